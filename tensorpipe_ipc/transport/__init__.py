"""The way from a producer to a consumer: addresses, sockets, and the conversation between two ends."""
