"""Threads and clocks: the event loop, the one thread that computes on a CPU, deadlines."""
