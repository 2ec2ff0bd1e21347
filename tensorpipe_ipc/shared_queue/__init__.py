"""Queues in shared memory: pipes of tickets, put and get, and the recovery of what a dead process began."""
