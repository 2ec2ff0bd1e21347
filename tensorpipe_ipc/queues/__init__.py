"""Multiprocessing's queues, contexts, pools and executors over shared memory."""
