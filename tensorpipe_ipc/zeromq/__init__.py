"""ZeroMQ's sockets: addresses, keys, frames, and each call that may fail. Nothing else imports zmq."""
