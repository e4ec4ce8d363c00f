"""Threads and timeouts: the engine's event loop, the compute thread of a CPU, deadlines."""
