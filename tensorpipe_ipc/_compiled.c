/* The compiled path: put and get of everyday messages. docs/design/compiled.md has the contract.

   It answers "done", or "not me, and nothing was changed": then the Python source does it, which is the reference. The steps P1
   to P8 and G1 to G7 are those of shared_queue/recovery.py, on the same words, and on the same lists of spare operations, so that
   both may be mixed call by call. From P4 to P8, and from G4's end to G7, no Python code runs, and so no signal's handler. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "dlpack.h"

/* memory/arena.py, wire/layout.py, shared_queue/tokens.py: tests compare them. */
enum { CREDIT = 1, NBYTES = 2, METADATA = 3, WRITTEN = 6 }; /* words of a block's header, after its state */
enum { HEADER = 64, SMALLEST = 9, SMALL = 448, QUICK = 16, QUEUED = 2, BATCH = 64 };
enum { ALIGN = 64, BULK = 1 << 16, LEASE_FROM = 32 << 10, WORTHWHILE = 16 << 10, LAST_DOORBELL = 3, SLOT_BITS = 24 };
enum { NONE = 0x00, VALUE = 0x01, TENSOR = 0x10, LIST = 0x20, TUPLE = 0x21, DICT = 0x22 }; /* wire/spec.py */
#define HOLDER 0xFFFFFFFFull
#define NEXT_LAP (1ull << SLOT_BITS)
enum { MOST_DIMS = 8, MOST_DEPTH = 64, MOST_LEAVES = 1 << 14, MOST_METADATA = 1 << 20, MOST_NODES = 1 << 17, FEW = 64 };
enum { OPERATIONS = 64, PLANS = 16, KEPT = 1 << 12, CLASSES = 40, LONG = 1 << 20, OFFSETS = 44 };

/* ---- steps ---- */

/* Each store to shared words, and each system call, is a step. A test has the process die before the n-th, or after it. */
static long steps_left = 0;
static void step(void) {
    if (steps_left > 0 && --steps_left == 0)
        for (kill(getpid(), SIGKILL);;)
            pause();
}

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static void store(uint64_t *word, uint64_t value) {
    step();
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    step();
}

/* Return how many were read; 0: errno says why. */
static int read_tokens(int fd, uint64_t *first, int most) {
    step();
    ssize_t got = read(fd, first, 8 * (size_t)most);
    step();
    return got > 0 ? (int)(got / 8) : 0;
}

/* Return whether they were written: all of them or none, as a pipe does up to 4,096 bytes. */
static int write_tokens(int fd, const uint64_t *first, int count) {
    step();
    ssize_t given = write(fd, first, 8 * (size_t)count);
    step();
    return given > 0;
}

/* ---- torch, by DLPack's table of functions ---- */

static const DLPackExchangeAPI *torch_api;
typedef PyObject *(*Method)(PyObject *self, PyObject *none); /* a C function of torch's own, which Python calls so, too */
static Method is_neg, storage_of, is_shared, data_ptr, is_moded; /* of tensors, of storages, torch's */
static PyObject *tensor_type, *bytes;                            /* torch.Tensor; torch.uint8 and torch.int8 */
static PyObject *known_keys, *encode_values, *decode_values;    /* wire/flatten.py, wire/message.py, wire/schema.py */
static PyObject *s_requires_grad, *s_append, *s_is_direct, *s_dtype;

static const uint16_t DTYPES[] = { /* by wire code: DLPack's code, and bits (wire/dtypes.py) */
    0, kDLBool << 8 | 8, kDLUInt << 8 | 8, kDLInt << 8 | 8, kDLUInt << 8 | 16, kDLInt << 8 | 16, kDLUInt << 8 | 32,
    kDLInt << 8 | 32, kDLUInt << 8 | 64, kDLInt << 8 | 64, kDLFloat << 8 | 16, kDLFloat << 8 | 32, kDLFloat << 8 | 64,
    kDLBfloat << 8 | 16};
enum { CODES = sizeof DTYPES / sizeof *DTYPES };
static int code_of(DLDataType dtype) {
    int code = CODES - 1;
    while (code && (dtype.lanes != 1 || DTYPES[code] != (dtype.code << 8 | dtype.bits)))
        code--;
    return code;
}

/* Whether a method answers False. No exception is left. */
static int answers_false(Method method, PyObject *object) {
    PyObject *answer = method(object, NULL);
    int is_false = answer == Py_False;
    PyErr_Clear();
    Py_XDECREF(answer);
    return is_false;
}

/* Whether torch's methods call no Python, as they do where a default device is set: a handler of a signal may raise there. */
static int is_plain(void) { return answers_false(is_moded, NULL); }

/* ---- a tree, taken apart (wire/flatten.py) ---- */

typedef struct { const char *data; uint64_t nbytes, at; } Leaf; /* at: where it lies in the payload */
typedef struct { char at[MOST_METADATA]; size_t length; } Bytes;
typedef struct {
    Bytes spec, metas;
    PyObject *values; /* a list, and then its msgpack; NULL: there are none */
    Leaf leaves[MOST_LEAVES];
    PyObject *held[2 * MOST_LEAVES]; /* storages, and containers but the outermost */
    uintptr_t once[2 * MOST_LEAVES]; /* where those containers, and the memory of those storages, lie: none twice in a tree */
    size_t count, things, nodes;
    uint32_t schema_length;
    uint64_t length, nbytes, size; /* of the metadata, of the payload, of the leaves alone */
    pid_t user;              /* one put of a process at a time: a finalizer may put, too, and a large one gives up the GIL */
} Apart;
static Apart scratch;
static int add(Bytes *bytes, const void *from, size_t length) {
    if (bytes->length + length > MOST_METADATA)
        return 0;
    memcpy(bytes->at + bytes->length, from, length);
    bytes->length += length;
    return 1;
}

static int add_op(Apart *apart, char op) { return add(&apart->spec, &op, 1); }
/* The functions below return whether the tree is an everyday one so far. Before Python 3.12 whatever makes an object may collect
   garbage, and so run finalizers, which may change the tree: so what is looked at is held. */
static int hold(Apart *apart, PyObject *thing, uintptr_t address) {
    if (apart->things == 2 * MOST_LEAVES || !address)
        return 0;
    apart->once[apart->things] = address;
    apart->held[apart->things++] = Py_NewRef(thing);
    return 1;
}

static int by_address(const void *one, const void *other) {
    uintptr_t first = *(const uintptr_t *)one, second = *(const uintptr_t *)other;
    return (first > second) - (first < second);
}
static int all_differ(uintptr_t *all, size_t count) {
    qsort(all, count, sizeof *all, by_address);
    for (size_t i = 1; i < count; i++)
        if (all[i] == all[i - 1])
            return 0;
    return 1;
}

/* Where the memory of a storage begins; 0: not known. */
static uintptr_t ground_of(PyObject *storage) {
    PyObject *number = data_ptr(storage, NULL);
    uintptr_t address = number == NULL ? 0 : (uintptr_t)PyLong_AsSize_t(number);
    Py_XDECREF(number);
    return address;
}

static int take_tensor(Apart *apart, PyObject *tensor, int depth) {
    PyObject *grad = PyObject_GetAttr(tensor, s_requires_grad);
    Py_XDECREF(grad);
    PyErr_Clear();
    if (grad != Py_False || apart->count == MOST_LEAVES || !answers_false(is_neg, tensor))
        return 0;
    PyObject *storage = storage_of(tensor, NULL); /* torch keeps one object for each */
    int is_own = storage != NULL && answers_false(is_shared, storage)
                 && hold(apart, storage, depth ? ground_of(storage) : (uintptr_t)storage);
    Py_XDECREF(storage);
    DLTensor seen; /* last: it points into the tensor */
    if (!is_own || torch_api->dltensor_from_py_object_no_sync(tensor, &seen)) {
        PyErr_Clear();
        return 0;
    }
    int code = code_of(seen.dtype), ndim = seen.ndim;
    if (code == 2 || code == 3) { /* torch tells so of integers of less than 8 bits, too */
        PyObject *dtype = PyObject_GetAttr(tensor, s_dtype);
        code = dtype != NULL && PySequence_Contains(bytes, dtype) > 0 ? code : 0;
        Py_XDECREF(dtype);
    }
    if (!code || seen.device.device_type != kDLCPU || ndim > MOST_DIMS
        || (!((uintptr_t)seen.data >> OFFSETS) && !ground_of(apart->held[apart->things - 1]))) /* its memory is gone */
        return 0;
    int64_t items = 1;
    for (int dim = ndim - 1; dim >= 0; dim--) { /* row after row, without gaps */
        if (seen.shape[dim] != 1 && seen.strides != NULL && seen.strides[dim] != items)
            return 0;
        items *= seen.shape[dim];
    }
    Leaf *leaf = &apart->leaves[apart->count++];
    leaf->data = (const char *)seen.data + seen.byte_offset;
    leaf->nbytes = (uint64_t)items * (seen.dtype.bits / 8);
    return items > 0 && add_op(apart, TENSOR) && add(&apart->metas, (const char[]){(char)code, 0, (char)ndim, 0}, 4) /* metas.py */
           && add(&apart->metas, &leaf->nbytes, 8) && add(&apart->metas, seen.shape, 8 * (size_t)ndim);
}
static int take_value(Apart *apart, PyObject *value) {
    if (apart->values == NULL)
        apart->values = PyList_New(0);
    int is_added = apart->values != NULL && !PyList_Append(apart->values, value);
    PyErr_Clear();
    return is_added && PyList_Size(apart->values) <= FEW + 4 * (Py_ssize_t)apart->count && add_op(apart, VALUE); /* flatten.py */
}

static int take_node(Apart *apart, PyObject *node, int depth);
static int take_keys(Apart *apart, PyObject *dict) {
    PyObject *key;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, NULL)) {
        char *packed;
        Py_ssize_t length;
        PyObject *known = PyUnicode_CheckExact(key) ? PyDict_GetItemWithError(known_keys, key) : NULL; /* of Python's puts */
        if (known == NULL || PyBytes_AsStringAndSize(known, &packed, &length) || !add(&apart->spec, packed, (size_t)length)) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}
static int take_container(Apart *apart, PyObject *node, int depth) {
    int op = PyDict_CheckExact(node) ? DICT : PyList_CheckExact(node) ? LIST : TUPLE, taken = 1;
    Py_ssize_t length = PyObject_Size(node);
    uint32_t count = (uint32_t)length;
    apart->nodes += (size_t)length;
    if (depth == MOST_DEPTH || apart->nodes > MOST_NODES || !add_op(apart, (char)op) || !add(&apart->spec, &count, 4))
        return 0;
    if (depth && (length || op != TUPLE) && !hold(apart, node, (uintptr_t)node)) /* there is but one () */
        return 0;
    if (op == DICT && !take_keys(apart, node))
        return 0;
    PyObject *children = op == DICT ? PyDict_Values(node) : Py_NewRef(node);
    for (Py_ssize_t i = 0; children != NULL && i < length && taken; i++) {
        PyObject *child = PySequence_GetItem(children, i); /* NULL: it is shorter by now */
        taken = child != NULL && take_node(apart, child, depth + 1);
        Py_XDECREF(child);
    }
    Py_XDECREF(children);
    PyErr_Clear();
    return taken && PyObject_Size(node) == length;
}

static int take_node(Apart *apart, PyObject *node, int depth) {
    if ((PyObject *)Py_TYPE(node) == tensor_type)
        return take_tensor(apart, node, depth);
    if (PyDict_CheckExact(node) || PyList_CheckExact(node) || PyTuple_CheckExact(node))
        return take_container(apart, node, depth);
    if (PyBool_Check(node) || PyLong_CheckExact(node) || PyFloat_CheckExact(node) || PyUnicode_CheckExact(node))
        return take_value(apart, node);
    return node == Py_None && add_op(apart, NONE);
}

/* Give each leaf its place, the small ones first (wire/layout.py). */
static void lay_out(Apart *apart) {
    apart->nbytes = apart->size = 0;
    for (int large = 0; large < 2; large++)
        for (Leaf *leaf = apart->leaves; leaf < apart->leaves + apart->count; leaf++)
            if ((leaf->nbytes >= BULK) == large) {
                leaf->at = (apart->nbytes + ALIGN - 1) & -(uint64_t)ALIGN;
                apart->nbytes = leaf->at + leaf->nbytes;
                apart->size += leaf->nbytes;
            }
    apart->schema_length = (uint32_t)(1 + 3 + 4 + apart->spec.length + 4 + 4 + apart->metas.length);
    apart->length = 5 + apart->schema_length + (apart->values == NULL ? 0 : (size_t)PyBytes_Size(apart->values));
}

static int take_apart(Apart *apart, PyObject *tree) {
    apart->spec.length = apart->metas.length = apart->count = 0, apart->nodes = 1;
    if (!take_node(apart, tree, 0) || !apart->count || !all_differ(apart->once, apart->things))
        return 0;
    if (apart->values != NULL) {
        PyObject *packed = PyObject_CallFunctionObjArgs(encode_values, apart->values, NULL);
        PyErr_Clear(); /* an integer of over 64 bits, a lone surrogate */
        Py_DECREF(apart->values);
        apart->values = packed;
        if (packed == NULL)
            return 0;
    }
    lay_out(apart);
    return 1;
}
static void let_go_of(Apart *apart) {
    while (apart->things)
        Py_DECREF(apart->held[--apart->things]);
    Py_CLEAR(apart->values);
}

/* ---- one queue, in one process ---- */

/* Of an operation (memory/row.py), the indices of its words. */
typedef struct { PyObject *operation; unsigned long long credit, ticket, given, counters, hazard; } Words;
/* Where a tensor lies in a payload; as compiled.py packs it. */
typedef struct { int64_t code, ndim, start, shape[MOST_DIMS], strides[MOST_DIMS]; } Place;
typedef struct { /* what the metadata of messages begin with, and what the Python source has read there */
    PyObject *told; /* keeps all the rest */
    const char *head;
    const unsigned char *spec;
    const Place *places;
    PyObject *dicts; /* with their keys alone: a copy of one has room for all */
    size_t head_length, count;
    unsigned long long nbytes, size; /* of a payload, of the leaves alone */
    Py_ssize_t values;
} Plan;
typedef struct { /* as compiled.py packs them */
    uint64_t address, size, watch, shut, spilled, grown, laps, slots, table, floors, tag, writing, queued, whole, tells_size;
    int64_t tickets_fd, read_end, credits_fd;
    double spin;
    uint64_t own[CLASSES];
} Numbers;
typedef struct {
    PyObject_HEAD
    Numbers is;
    uint64_t *words; /* the segment */
    char *memory;    /* the same */
    uint64_t size;   /* of the leaves that were put last */
    pid_t process;
    double due_at;
    unsigned spins, next_plan;
    int is_dropped; /* the process is another */
    PyObject *unfinished, *keeping, *backlog, *aside, *early, *free, *recent, *puts, *put_batches, *gets, *get_batches, *send_taken,
        *finish_sent, *look_for_freed, *get_taken, *see_to, *take_up, *lease, *plan_of, *again, *stopped, *decode; /* in this order */
    Words known[OPERATIONS];
    Plan plans[PLANS];
} Path;
#define OBJECTS (1 + (Py_ssize_t)(offsetof(Path, decode) - offsetof(Path, unfinished)) / (Py_ssize_t)sizeof(PyObject *))
static int is_empty(PyObject *collection) { return PyObject_Size(collection) == 0; }
static int is_quiet(const Path *path) {
    return !path->is_dropped && !load(path->words + path->is.watch) && is_empty(path->unfinished) && is_empty(path->keeping);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Whether Python is to look for what lies idle, as it does with each call. It looks ten times a second, for 20 ms at most. */
static int is_due(Path *path) {
    double time = !path->is_dropped && load(path->words + path->is.grown) ? now() : 0;
    if (time < path->due_at)
        return 0;
    path->due_at = time + 0.1;
    return time > 0;
}

/* Return a spare operation's words, and take it out of its list; NULL: there is none. */
static Words *take_spare(Path *path, PyObject *spares) {
    Py_ssize_t last = PyList_Size(spares) - 1;
    PyObject *operation = last < 0 ? NULL : PyList_GetItem(spares, last);
    Words *words = path->known;
    while (words < path->known + OPERATIONS && words->operation != NULL && words->operation != operation)
        words++;
    if (operation == NULL || words == path->known + OPERATIONS)
        return NULL;
    PyList_SetSlice(spares, last, last + 1, NULL); /* makes it shorter, which takes no memory */
    if (words->operation == NULL) { /* for good: there are few, and they live as long as the queue */
        PyObject *indices = PyObject_GetAttrString(operation, "indices");
        int is_known = indices != NULL && PyArg_ParseTuple(indices, "KKKKK", &words->credit, &words->ticket, &words->given,
                                                           &words->counters, &words->hazard);
        Py_XDECREF(indices);
        if (!is_known) { /* no memory */
            PyErr_Clear();
            return NULL;
        }
        words->operation = Py_NewRef(operation);
    }
    return words;
}

/* An operation is over, or not needed. */
static void give_back(Path *path, PyObject *spares, const Words *words, int count, uint64_t nbytes) {
    uint64_t *counters = path->words + words->counters;
    counters[0] += (unsigned)count;
    counters[1] += nbytes;
    if (PyList_Append(spares, words->operation))
        PyErr_Clear(); /* no memory: the next call has another one */
}

/* Take the exception that is set; NULL: there is no memory for one. */
static PyObject *caught(void) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (error != NULL && trace != NULL)
        PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
}

/* An exception is set, and an operation has begun: Python has it finished, now or later, as any that was interrupted. It is on
   record before a call, at which a handler may raise. In a child that a handler has forked it is the parent's to do. */
static void leave_to(Path *path, PyObject *finish, PyObject *operation) {
    if (path->is_dropped)
        return;
    PyObject *error = caught(), *entry = Py_BuildValue("[OOOO]", finish, operation, Py_None, error ? error : Py_None);
    if (entry != NULL && !PyList_Append(path->unfinished, entry))
        Py_XDECREF(PyObject_CallFunctionObjArgs(path->take_up, NULL));
    if (!PyErr_Occurred()) /* else what that has raised, as in Python */
        error ? PyErr_SetObject((PyObject *)Py_TYPE(error), error) : PyErr_SetNone(PyExc_MemoryError);
    Py_XDECREF(entry);
    Py_XDECREF(error);
}

/* Have a method of Python's go on with an operation that has begun. The list says whether it has come to have it: a signal's
   handler may raise as soon as it is called. */
static PyObject *hand_to(Path *path, PyObject *method, PyObject *finish, PyObject *operation, PyObject *more) {
    PyObject *taken = PyErr_Occurred() || path->is_dropped ? NULL : Py_BuildValue("[O]", operation);
    PyObject *done = taken ? PyObject_CallFunctionObjArgs(method, taken, more, NULL) : NULL;
    if (done == NULL && (taken == NULL || PyList_Size(taken)))
        leave_to(path, finish, operation);
    Py_XDECREF(taken);
    return done;
}

/* ---- put ---- */

static int size_class_of(uint64_t room) { return room > SMALL ? 64 - __builtin_clzll(room + HEADER - 1) : SMALLEST; }
/* P1, P2. Return how many credits were taken, or are not needed; a doorbell among them says nothing but: look again. */
static int take_credits(Path *path, const Words *words, int most) {
    uint64_t *credits = path->words + words->credit;
    if (path->is.credits_fd < 0)
        return most;
    int count = read_tokens((int)path->is.credits_fd, credits, most);
    for (int i = 0; i < count; i++) {
        uint64_t credit = load(credits + i);
        if (credit > LAST_DOORBELL)
            store(path->words + path->is.laps + (credit & (NEXT_LAP - 1)) % path->is.slots, credit >> SLOT_BITS);
    }
    return count;
}

/* Give back credits that no message needs, as those of messages that were got. */
static void return_credits(Path *path, const Words *words, int from, int to) {
    uint64_t *credits = path->words + words->credit, *given = path->words + words->given;
    for (int i = from; i < to && path->is.credits_fd >= 0; i++) {
        uint64_t credit = load(credits + i);
        if (credit > LAST_DOORBELL) {
            store(given + i, credit + NEXT_LAP);
            if (!write_tokens((int)path->is.credits_fd, given + i, 1))
                continue; /* the pipe holds more than it was made for. It is on record */
        }
        store(credits + i, 0);
        store(given + i, 0);
    }
}

/* Have a block, if it is free, and large enough. Whoever takes extents sees the hazard (memory/extents.py, "Changing hands"). */
static int claim_block(Path *path, const Words *words, uint64_t block, int size_class, uint64_t room) {
    uint64_t *state = path->words + (block >> 3);
    int is_mine = 0;
    store(path->words + words->hazard, block);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (load(path->words + path->is.table + (block >> 20)) == path->is.own[size_class]) {
        uint64_t before = load(state);
        before = before ? before : load(path->words + path->is.floors + (block >> 20)) << 32;
        is_mine = !(before & HOLDER) && ((uint64_t)size_class <= path->is.whole || load(state + WRITTEN) >= room + HEADER);
        if (is_mine)
            store(state, before | path->is.writing);
    }
    store(path->words + words->hazard, 0);
    return is_mine;
}

/* Take the block that was put last, which is warm, if it is free again; or one off the list of free ones: PutEnd._block.
   0: Python looks for one. */
static uint64_t take_block(Path *path, const Words *words, int size_class, uint64_t room) {
    PyObject *recent = PyList_GetItem(path->recent, size_class), *list = PyList_GetItem(path->free, size_class);
    PyObject *number = PySequence_GetItem(recent, -1);
    uint64_t block = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
    Py_XDECREF(number);
    PyErr_Clear(); /* there is none */
    if (block && claim_block(path, words, block, size_class, room))
        return block;
    Py_ssize_t last = PyList_Size(list) - 1;
    if (last < 0)
        return 0;
    number = Py_NewRef(PyList_GetItem(list, last));
    block = PyLong_AsUnsignedLongLong(number);
    PyList_SetSlice(list, last, last + 1, NULL); /* makes it shorter, which takes no memory */
    int is_mine = claim_block(path, words, block, size_class, room);
    PyObject *done = is_mine ? PyObject_CallMethodObjArgs(recent, s_append, number, NULL) : NULL;
    Py_XDECREF(done);
    if (!is_mine && PyList_Append(list, number)) /* it is another's, or in use: Python looks for the next */
        is_mine = 0;
    PyErr_Clear(); /* no memory: it is found by a slower look */
    Py_DECREF(number);
    return is_mine ? block : 0;
}

/* wire/in_block.py, wire/schema.py */
static void write_metadata(const Apart *apart, char *at) {
    struct __attribute__((packed)) {
        uint8_t flags;
        uint32_t schema;
        char serializer[4];
        uint32_t spec;
    } head = {0, apart->schema_length, "\3raw", (uint32_t)apart->spec.length};
    uint32_t spans_and_leaves[2] = {0, (uint32_t)apart->count};
    at = (char *)memcpy(at, &head, sizeof head) + sizeof head;
    at = (char *)memcpy(at, apart->spec.at, apart->spec.length) + apart->spec.length;
    at = (char *)memcpy(at, spans_and_leaves, 8) + 8;
    at = (char *)memcpy(at, apart->metas.at, apart->metas.length) + apart->metas.length;
    if (apart->values != NULL)
        memcpy(at, PyBytes_AsString(apart->values), (size_t)PyBytes_Size(apart->values));
}
static void write_payload(const Apart *apart, char *place) {
    for (const Leaf *leaf = apart->leaves; leaf < apart->leaves + apart->count; leaf++) {
        uint64_t end = leaf->at + leaf->nbytes, padded = (end + ALIGN - 1) & -(uint64_t)ALIGN;
        memcpy(place + leaf->at, leaf->data, leaf->nbytes);
        memset(place + end, 0, (padded < apart->nbytes ? padded : apart->nbytes) - end);
    }
}

/* P3 of the i-th message of an operation. Return its ticket; 0: no block is at hand, or it is too large. */
static uint64_t fill(Path *path, const Words *words, int i) {
    uint64_t behind = (scratch.length + ALIGN - 1) & -(uint64_t)ALIGN, room = behind + scratch.nbytes;
    int size_class = size_class_of(room);
    uint64_t credit = path->is.credits_fd < 0 ? 0 : load(path->words + words->credit + i);
    if (scratch.length > MOST_METADATA || size_class >= CLASSES || (path->is.credits_fd >= 0 && credit <= LAST_DOORBELL))
        return 0;
    uint64_t block = take_block(path, words, size_class, room), *state = path->words + (block >> 3);
    if (!block)
        return 0;
    store(state + CREDIT, credit);
    store(state + NBYTES, scratch.nbytes);
    store(state + METADATA, scratch.length << 32 | path->is.tag);
    write_metadata(&scratch, path->memory + block + HEADER);
    if (scratch.nbytes < LONG) {
        write_payload(&scratch, path->memory + block + HEADER + behind);
    } else { /* the storages are held; whoever writes to them meanwhile has it so */
        Py_BEGIN_ALLOW_THREADS
        write_payload(&scratch, path->memory + block + HEADER + behind);
        Py_END_ALLOW_THREADS
    }
    return block >> SMALLEST << 32 | (uint32_t)((load(state) >> 32) + 1);
}

/* P4 to P8. Return 1; or -1: an exception is set, and Python sees to the operation. */
static int send(Path *path, PyObject *spares, Words *words, const uint64_t *tickets, int count, uint64_t nbytes) {
    uint64_t *all = path->words, *named = all + words->ticket;
    for (int i = 0; i < count; i++)
        store(named + i, tickets[i]); /* P4 */
    int is_given = 0;
    if (!load(all + path->is.watch) && !load(all + path->is.shut)) { /* else that is Python's */
        for (int i = 0; i < count; i++)
            store(all + (tickets[i] >> 32 << (SMALLEST - 3)), tickets[i] << 32 | path->is.queued); /* P5 */
        is_given = write_tokens((int)path->is.tickets_fd, named, count);                            /* P6 */
    }
    if (!is_given) {
        PyObject *done = Py_BuildValue("(iK)", count, (unsigned long long)nbytes);
        PyObject *sent = hand_to(path, path->send_taken, path->finish_sent, words->operation, done);
        Py_XDECREF(done);
        Py_XDECREF(sent);
        return sent == NULL ? -1 : 1;
    }
    for (int i = 0; i < count; i++) {
        store(all + words->credit + i, 0); /* P7 */
        store(named + i, 0);               /* P8 */
    }
    give_back(path, spares, words, count, nbytes);
    return 1;
}

/* Look for blocks that others have freed, where a large message is to take one, or too few are at hand. Return whether the tree,
   taken apart anew if other code has run, is of every day; -1: an exception is set. */
static int look_for_freed(Path *path, PyObject *tree, int wanted) {
    int size_class = size_class_of(scratch.length + ALIGN + scratch.nbytes);
    if (size_class >= CLASSES || (size_class <= QUICK && PyList_Size(PyList_GetItem(path->free, size_class)) >= wanted))
        return size_class < CLASSES;
    PyObject *looked = PyObject_CallFunction(path->look_for_freed, "i", size_class);
    Py_XDECREF(looked);
    let_go_of(&scratch);
    return looked == NULL ? -1 : take_apart(&scratch, tree);
}

/* Put a tree, or as many of a list's first ones as are of every day and have room. Return how many; -1: an exception is set. */
static int put_some(Path *path, PyObject *spares, PyObject *trees, int most) {
    Words *words = NULL;
    uint64_t tickets[BATCH], nbytes = 0;
    int count = 0, credits = 0, taken = 1, is_many = spares == path->put_batches;
    if (scratch.user == path->process || !is_quiet(path) || !is_empty(path->backlog) || !is_plain())
        return 0;
    scratch.user = path->process;
    let_go_of(&scratch); /* what another thread of the parent had in it */
    for (; count < most && nbytes < LONG; count++) {
        PyObject *tree = is_many ? PySequence_GetItem(trees, count) : trees; /* NULL: the list is shorter by now */
        taken = tree != NULL && take_apart(&scratch, tree);
        if (taken && !count)
            taken = look_for_freed(path, tree, is_due(path) ? LONG : most); /* more than there are: for what lies idle, too */
        if (is_many)
            Py_XDECREF(tree);
        if (path->is_dropped) /* a finalizer has forked, and this is the child */
            break;
        if (taken > 0 && words == NULL && is_quiet(path) && (words = take_spare(path, spares)) != NULL)
            credits = take_credits(path, words, most); /* P1, P2 */
        tickets[count] = taken > 0 && count < credits ? fill(path, words, count) : 0;
        if (!tickets[count])
            break;
        nbytes += scratch.nbytes;
        path->size = scratch.size;
        let_go_of(&scratch);
    }
    let_go_of(&scratch);
    scratch.user = 0;
    if (taken >= 0)
        PyErr_Clear();
    if (words == NULL || path->is_dropped)
        return taken < 0 ? -1 : 0;
    return_credits(path, words, count, credits);
    if (!count)
        give_back(path, spares, words, 0, 0);
    else if (send(path, spares, words, tickets, count, nbytes) < 0)
        return -1;
    return count;
}

static PyObject *path_put(PyObject *self, PyObject *tree) {
    int done = put_some((Path *)self, ((Path *)self)->puts, tree, 1);
    return done < 0 ? NULL : PyLong_FromUnsignedLongLong(done ? ((Path *)self)->size : 0);
}
static PyObject *path_put_many(PyObject *self, PyObject *list) {
    Py_ssize_t most = PyObject_Size(list);
    int done = put_some((Path *)self, ((Path *)self)->put_batches, list, most < BATCH ? (int)most : BATCH);
    return done < 0 ? NULL : PyLong_FromLong(done);
}

/* ---- tensors on a copy of the payload, or on a lease ---- */

/* What tensors lie on: a copy, which stands behind this; or a lease, of which each has a reference: those are counted. */
typedef struct {
    atomic_size_t users; /* tensors, and the build */
    PyObject *lease;
    DLManagedTensorVersioned tensors[];
} Ground;
typedef struct {
    const Plan *plan;
    Ground *ground;
    char *payload;
    const unsigned char *spec;
    PyObject *values;
    Py_ssize_t value, dict, leaf;
} Build;
static void leave(Ground *ground) {
    if (atomic_fetch_sub_explicit(&ground->users, 1, memory_order_acq_rel) == 1)
        free(ground);
}
static void let_go(DLManagedTensorVersioned *managed) { /* on any thread, with the GIL or without it */
    Ground *ground = managed->manager_ctx;
    if (ground->lease != NULL && Py_IsInitialized()) { /* else a static object of C++ had it to the end */
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(ground->lease);
        PyGILState_Release(state);
    }
    leave(ground);
}

/* wire/direct.py: of large tensors on a lease. */
static PyObject *mark(PyObject *tensor) {
    PyObject *storage = storage_of(tensor, NULL);
    if (storage == NULL || PyObject_SetAttr(storage, s_is_direct, Py_True))
        Py_CLEAR(tensor);
    Py_XDECREF(storage);
    return tensor;
}

static PyObject *build_tensor(Build *build) {
    const Place *place = &build->plan->places[build->leaf];
    Ground *ground = build->ground;
    DLManagedTensorVersioned *managed = &ground->tensors[build->leaf++];
    DLDataType dtype = {(uint8_t)(DTYPES[place->code] >> 8), (uint8_t)DTYPES[place->code], 1};
    *managed = (DLManagedTensorVersioned){
        .version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION},
        .manager_ctx = ground,
        .deleter = let_go,
        .dl_tensor = {build->payload + place->start, {kDLCPU, 0}, (int32_t)place->ndim, dtype, (int64_t *)place->shape,
                      (int64_t *)place->strides, 0}};
    void *tensor = NULL;
    atomic_fetch_add_explicit(&ground->users, 1, memory_order_relaxed);
    Py_XINCREF(ground->lease);
    if (torch_api->managed_tensor_to_py_object_no_sync(managed, &tensor))
        return NULL; /* it has called the deleter, unless there is no memory for what is made before: then the ground stays */
    return ground->lease != NULL && build->plan->nbytes >= WORTHWHILE * build->plan->count ? mark(tensor) : tensor;
}
static PyObject *build_node(Build *build) {
    int op = *build->spec++;
    uint32_t count;
    PyObject *made, *child, *key, *dict = NULL;
    if (op == TENSOR)
        return build_tensor(build);
    if (op == VALUE)
        return Py_XNewRef(PyList_GetItem(build->values, build->value++));
    if (op == NONE)
        Py_RETURN_NONE;
    memcpy(&count, build->spec, 4);
    build->spec += 4;
    Py_ssize_t position = 0;
    for (uint32_t i = 0; op == DICT && i < count; i++) /* the keys themselves are the plan's */
        build->spec += 2 + build->spec[0] + 256 * build->spec[1];
    if (op == DICT)
        made = PyDict_Copy(dict = PyTuple_GetItem(build->plan->dicts, build->dict++));
    else
        made = op == LIST ? PyList_New(count) : PyTuple_New(count);
    for (uint32_t i = 0; made != NULL && i < count; i++) {
        child = build_node(build);
        int is_set = child != NULL;
        if (is_set && op == DICT)
            is_set = PyDict_Next(dict, &position, &key, NULL) && !PyDict_SetItem(made, key, child);
        else if (is_set)
            is_set = !(op == LIST ? PyList_SetItem(made, i, child) : PyTuple_SetItem(made, i, child));
        if (op == DICT)
            Py_XDECREF(child);
        if (!is_set)
            Py_CLEAR(made);
    }
    return made;
}

/* Return the tree of a message, on a lease, or on a copy of its payload; NULL: not me. */
static PyObject *build_tree(const Plan *plan, PyObject *values, char *payload, PyObject *lease) {
    size_t before = sizeof(Ground) + plan->count * sizeof(DLManagedTensorVersioned);
    size_t copied = lease ? 0 : plan->nbytes;
    Ground *ground = malloc(before + ALIGN + copied); /* quicker than aligned_alloc, by a tenth of a get */
    if (ground == NULL)
        return NULL;
    atomic_init(&ground->users, 1);
    ground->lease = lease;
    if (lease == NULL)
        payload = memcpy((char *)(((uintptr_t)ground + before + ALIGN - 1) & -(uintptr_t)ALIGN), payload, copied);
    Build build = {plan, ground, payload, plan->spec, values, 0, 0, 0};
    PyObject *tree = build_node(&build);
    PyErr_Clear(); /* no memory */
    leave(ground);
    return tree;
}

/* ---- get ---- */

typedef struct { uint64_t *state, before, after, nbytes, credit; } Taken; /* a block whose ticket was taken */
/* Have a plan for metadata that begin so, whose ``told`` is to be let go of; or return 0: not me, or an exception is set. */
static int find_plan(Path *path, const char *metadata, size_t length, Plan *found) {
    uint32_t schema;
    if (length < 5 || metadata[0]) /* flags */
        return 0;
    memcpy(&schema, metadata + 1, 4);
    size_t head_length = 5 + (size_t)schema;
    if (head_length > length)
        return 0;
    for (Plan *plan = path->plans; plan < path->plans + PLANS; plan++)
        if (plan->told != NULL && plan->head_length == head_length && !memcmp(plan->head, metadata, head_length)) {
            Py_INCREF(plan->told);
            *found = *plan;
            return 1;
        }
    PyObject *head, *spec, *places; /* a copy is looked at: the message's writer may change it */
    PyObject *told = PyObject_CallFunction(path->plan_of, "y#", metadata, (Py_ssize_t)head_length);
    if (told == NULL || told == Py_None
        || !PyArg_ParseTuple(told, "SSSO!KKn", &head, &spec, &places, &PyTuple_Type, &found->dicts, &found->nbytes, &found->size,
                            &found->values)) {
        Py_XDECREF(told);
        return 0;
    }
    found->told = told, found->head = PyBytes_AsString(head), found->head_length = head_length;
    found->spec = (const unsigned char *)PyBytes_AsString(spec), found->places = (const Place *)PyBytes_AsString(places);
    found->count = (size_t)PyBytes_Size(places) / sizeof(Place);
    if (head_length > KEPT) /* as long as its schema is kept, that has it */
        return 1;
    Plan *kept = &path->plans[path->next_plan++ % PLANS];
    PyObject *before = kept->told;
    *kept = *found;
    Py_INCREF(told);
    Py_XDECREF(before);
    return 1;
}

/* Whether a block lies where a ticket says, and has so much room. The other end may be a stranger. */
static int has_room(const Path *path, uint64_t block, uint64_t end) {
    uint64_t extent = block < path->is.size ? load(path->words + path->is.table + (block >> 20)) : 0;
    uint64_t room = 1ull << (extent >> 16 & 0x3F), aligned = room < 1 << 20 ? room : 1 << 20;
    return extent && !(block & (aligned - 1)) && end <= block + room && end <= path->is.size;
}

/* G4, before G2, so that Python may do it all. Return a message whose ticket was taken; NULL: not me, or an exception is set. */
static PyObject *open_block(Path *path, uint64_t ticket, Taken *taken) {
    uint64_t block = ticket >> 32 << SMALLEST, *state = path->words + (block >> 3);
    if (ticket <= LAST_DOORBELL || !has_room(path, block, block + HEADER))
        return NULL;
    uint64_t length = load(state + METADATA) >> 32, behind = (length + ALIGN - 1) & -(uint64_t)ALIGN;
    *taken = (Taken){state, load(state), load(state) & ~HOLDER, load(state + NBYTES), load(state + CREDIT)};
    uint64_t start = block + HEADER + behind;
    if ((taken->before & 15) != QUEUED || taken->before >> 32 != (uint32_t)ticket || length > MOST_METADATA
        || taken->nbytes > path->is.size || !has_room(path, block, start + taken->nbytes))
        return NULL;
    char *metadata = path->memory + block + HEADER;
    PyObject *message = NULL, *values = NULL, *lease = NULL, *leased = NULL;
    unsigned long long held;
    Plan plan;
    if (!find_plan(path, metadata, length, &plan))
        return NULL;
    if (plan.count && plan.nbytes == taken->nbytes) { /* else it has more in it than is of every day */
        size_t left = length - plan.head_length;
        values = left ? PyObject_CallFunction(decode_values, "y#", metadata + plan.head_length, (Py_ssize_t)left) : PyList_New(0);
        if (values != NULL && PyList_Size(values) != plan.values)
            Py_CLEAR(values);
        PyErr_Clear(); /* whatever it is, Python says so */
    }
    if (values != NULL && plan.nbytes >= LEASE_FROM && is_plain())
        leased = PyObject_CallFunction(path->lease, "KKK", (unsigned long long)block, (unsigned long long)start, plan.nbytes);
    if (leased != NULL && leased != Py_None && PyArg_ParseTuple(leased, "OK", &lease, &held))
        taken->after = held;
    if (values != NULL && (plan.nbytes < LEASE_FROM || lease != NULL))
        message = build_tree(&plan, values, path->memory + start, lease);
    if (message != NULL && path->is.tells_size && (message = Py_BuildValue("NK", message, plan.size)) == NULL)
        PyErr_Clear();
    Py_DECREF(plan.told);
    Py_XDECREF(values);
    Py_XDECREF(leased);
    return message;
}

/* G1. Return how many tickets were taken; 0: none is there, or not me, or a signal's handler has raised. */
static int take_tickets(Path *path, uint64_t *first, int most, int waits) {
    int got = read_tokens((int)path->is.tickets_fd, first, most);
    if (!got && path->is.spin > 0 && (++path->spins <= 8 || !(path->spins & 63))) {
        Py_BEGIN_ALLOW_THREADS
        for (double until = now() + path->is.spin; !got && now() < until;)
            got = read_tokens((int)path->is.tickets_fd, first, most);
        Py_END_ALLOW_THREADS
        path->spins = got ? 0 : path->spins;
    }
    waits = waits && path->is.read_end >= 0 && !load(path->words + path->is.spilled); /* else a wait is cut into slices */
    while (!got && waits && !PyErr_CheckSignals() && is_quiet(path) && !load(path->words + path->is.grown)) {
        Py_BEGIN_ALLOW_THREADS
        got = read_tokens((int)path->is.read_end, first, most);
        Py_END_ALLOW_THREADS
        waits = errno == EINTR;
    }
    return got;
}

/* G2, G3, G5 to G7 of messages that were opened. Return whether it was done: else Python does it all. */
static int finish(Path *path, PyObject *spares, Words *words, const Taken *taken, int count) {
    uint64_t *given = path->words + words->given, nbytes = 0;
    for (int i = 0; i < count; i++) /* a finalizer may have forked, and then Python knows what is to be done */
        if (load(taken[i].state) != taken[i].before || !is_empty(path->early) || load(path->words + path->is.watch))
            return 0;
    for (int i = 0; i < count && path->is.credits_fd >= 0; i++)
        store(given + i, taken[i].credit + NEXT_LAP);                                                  /* G2 */
    if (path->is.credits_fd >= 0 && !write_tokens((int)path->is.credits_fd, given, count)) {           /* G3 */
        for (int i = 0; i < count; i++) /* the pipe holds more than it was made for: Python says so */
            store(given + i, 0);
        return 0;
    }
    for (int i = 0; i < count; i++) {
        store(taken[i].state, taken[i].after);     /* G5: HELD by its lease, or FREE */
        store(path->words + words->ticket + i, 0); /* G6 */
        store(given + i, 0);                       /* G7 */
        nbytes += taken[i].nbytes;
    }
    give_back(path, spares, words, count, nbytes);
    return 1;
}

/* Return what is got; StopIteration: Python is to go on. It is called by ``map``: CPython stores what a for statement gets with no
   look for signals in between. After a call it looks first, and a handler that raises would lose the message. */
static PyObject *get_some(Path *path, PyObject *spares, int most, int waits, PyObject *decode) {
    PyObject *found = NULL, *message = NULL;
    Words *words = !is_due(path) && is_quiet(path) && is_empty(path->aside) ? take_spare(path, spares) : NULL;
    if (words == NULL)
        return NULL;
    uint64_t *tickets = path->words + words->ticket;
    Taken taken[BATCH];
    int count = take_tickets(path, tickets, most, waits), opened = 0, is_many = spares == path->get_batches;
    if (!count && !path->is_dropped) /* else a handler has forked, and this is the child */
        give_back(path, spares, words, 0, 0);
    if (!count || path->is_dropped)
        return NULL;
    if (is_many)
        found = PyList_New(0);
    for (; opened < count && (found != NULL || !is_many); opened++) {
        message = open_block(path, load(tickets + opened), &taken[opened]);
        if (message == NULL || (is_many && PyList_Append(found, message)))
            break;
        if (is_many)
            Py_CLEAR(message);
    }
    is_many ? Py_XDECREF(message) : (void)(found = message);
    if (path->is_dropped && !PyErr_Occurred()) /* of a fork within; the steps that remain are the parent's */
        return found;
    if (opened == count && found != NULL && finish(path, spares, words, taken, count))
        return found;
    Py_XDECREF(found);
    found = hand_to(path, path->get_taken, path->see_to, words->operation, decode);
    if (found == NULL && PyErr_ExceptionMatches(path->again))
        PyErr_Clear(); /* not me: Python looks again */
    return found;
}
static PyObject *path_get(PyObject *self, PyObject *wish) {
    Path *path = (Path *)self;
    long most = PyLong_Check(wish) ? PyLong_AsLong(wish) : -1;
    int limit = most <= 0 ? 1 : most < BATCH ? (int)most : BATCH;
    PyObject *decode = PyLong_Check(wish) ? path->decode : wish;
    PyObject *found = get_some(path, most > 0 ? path->get_batches : path->gets, limit, most >= 0, decode);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_StopIteration)) { /* an object's own: ``map`` would end by it */
        PyObject *error = caught();
        if (error != NULL && PyList_Append(path->stopped, error))
            PyErr_Clear();
        Py_XDECREF(error);
    }
    if (found == NULL && !PyErr_Occurred())
        PyErr_SetNone(PyExc_StopIteration);
    return found;
}

/* ---- the types ---- */

static PyObject *path_drop(PyObject *self, PyObject *Py_UNUSED(none)) {
    ((Path *)self)->is_dropped = 1;
    Py_RETURN_NONE;
}

/* The numbers and the objects stand in compiled.py in the order in which they stand here. */
static PyObject *path_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(named)) {
    const char *numbers;
    Py_ssize_t length;
    PyObject *objects;
    if (!PyArg_ParseTuple(arguments, "y#O!", &numbers, &length, &PyTuple_Type, &objects))
        return NULL;
    Path *path = (Path *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (path == NULL || length != sizeof path->is || PyTuple_Size(objects) != OBJECTS)
        return PyErr_SetString(PyExc_SystemError, "no memory, or compiled.py is of another version"), NULL;
    for (PyObject **first = &path->unfinished; first <= &path->decode; first++)
        Py_INCREF(*first = PyTuple_GetItem(objects, first - &path->unfinished));
    memcpy(&path->is, numbers, sizeof path->is);
    path->process = getpid(), path->memory = (char *)(uintptr_t)path->is.address, path->words = (uint64_t *)path->memory;
    return (PyObject *)path;
}
static int path_traverse(PyObject *self, visitproc visit, void *arg) {
    Path *path = (Path *)self;
    Py_VISIT(Py_TYPE(self));
    for (PyObject **each = &path->unfinished; each <= &path->decode; each++)
        Py_VISIT(*each);
    for (int i = 0; i < PLANS; i++)
        Py_VISIT(path->plans[i].told);
    return 0;
}
static int path_clear(PyObject *self) {
    Path *path = (Path *)self;
    path->is_dropped = 1;
    for (PyObject **each = &path->unfinished; each <= &path->decode; each++)
        Py_CLEAR(*each);
    for (int i = 0; i < OPERATIONS; i++)
        Py_CLEAR(path->known[i].operation);
    for (int i = 0; i < PLANS; i++)
        Py_CLEAR(path->plans[i].told);
    return 0;
}
static void path_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    path_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}
static PyMethodDef path_methods[] = {
    {"put", path_put, METH_O, "Put a tree, if it is of every day and has room. Return how many bytes its tensors have; 0: it was not put."},
    {"put_many", path_put_many, METH_O, "The same of a list's first trees. Return how many were put."},
    {"get", path_get, METH_O, "Return a list of so many messages at most; 0: one, itself; -1, or its decode: if it is there."},
    {"drop", path_drop, METH_NOARGS, "Do nothing any more: this is a forked child."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot path_slots[] = {
    {Py_tp_new, path_new}, {Py_tp_traverse, path_traverse}, {Py_tp_clear, path_clear}, {Py_tp_dealloc, path_dealloc},
    {Py_tp_methods, path_methods}, {0, NULL}};
static PyType_Spec path_spec = {"tensorpipe_ipc._compiled.Path", sizeof(Path), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, path_slots};
static PyObject *die_at(PyObject *Py_UNUSED(module), PyObject *count) {
    long left = steps_left;
    steps_left = PyLong_AsLong(count);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(left);
}

/* Find the C function of a method without arguments, as a converter of PyArg_ParseTuple does. */
static int find(PyObject *bound, void *method) {
    int is_known = PyCFunction_Check(bound) && PyCFunction_GetFlags(bound) == METH_NOARGS;
    *(Method *)method = is_known ? PyCFunction_GetFunction(bound) : NULL;
    return is_known || (PyErr_SetString(PyExc_ImportError, "this torch's methods are no C functions"), 0);
}

/* Torch's table of functions, and what else is called: compiled.py gives it, in this order. */
static PyObject *use(PyObject *Py_UNUSED(module), PyObject *given) {
    PyObject *table;
    if (!PyArg_ParseTuple(given, "OOO&O&O&O&O&OOOOOOOO", &table, &tensor_type, find, &is_neg, find, &storage_of, find, &is_shared,
                          find, &data_ptr, find, &is_moded, &bytes, &known_keys, &encode_values, &decode_values, &s_requires_grad,
                          &s_append, &s_dtype, &s_is_direct))
        return NULL;
    Py_INCREF(given); /* for good: it keeps all of them */
    if ((torch_api = PyCapsule_GetPointer(table, "dlpack_exchange_api")) == NULL)
        return NULL;
    return PyBool_FromLong(torch_api->header.version.major == DLPACK_MAJOR_VERSION && torch_api->dltensor_from_py_object_no_sync);
}
static PyMethodDef functions[] = {
    {"use", use, METH_VARARGS, "Use these objects of torch's and of this package. Return whether it knows torch's DLPack."},
    {"die_at", die_at, METH_O, "For tests: have this process die at the n-th step; 0: at none. Return how many were left."},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_compiled", NULL, -1, functions, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__compiled(void) {
    PyObject *path = PyType_FromSpec(&path_spec), *module = path == NULL ? NULL : PyModule_Create(&definition);
    PyObject *sizes = Py_BuildValue("(nnn)", sizeof(Numbers), OBJECTS, sizeof(Place));
    return module == NULL || PyModule_AddObject(module, "Path", path) || PyModule_AddObject(module, "sizes", sizes) ? NULL : module;
}
