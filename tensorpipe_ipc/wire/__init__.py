"""The wire format: pure functions of bytes. It knows no socket, no shared memory, no CUDA.

* ``dtypes``: the one table of dtypes.
* ``spec``, ``flatten``, ``rebuild``: nested containers <-> plain bytes and a flat list of leaves.
* ``metas``: what a receiver must know of one tensor before its bytes.
* ``header``: the fixed prefix, the message kinds, the control messages.
* ``message``, ``schema``, ``sharing``: one message <-> its parts; ``layout``: where its payloads lie, in frames or in a block.

Whatever arrives is hostile until it has been checked, and it is checked before anything is allocated for it.
"""

import sys

if sys.byteorder != "little":
    raise ImportError(
        "tensorpipe_ipc sends tensors as they lie in memory and its wire is little-endian; this host is not"
    )
