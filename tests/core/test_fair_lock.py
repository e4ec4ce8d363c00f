"""A lock that threads get in order."""

from __future__ import annotations

import threading

from dashinfer_vlm_core.kernels.streams import FairLock
from tests.waiting import HANG, until


def test_threads_get_the_lock_in_order():
    lock, order = FairLock(), []

    def work(number):
        with lock, lock:  # reentrant
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    with lock:
        for count, thread in enumerate(threads, start=1):
            thread.start()
            until(lambda count=count: len(lock.waiting) == count)
    with lock:  # although this thread asks at once
        order.append("again")
    for thread in threads:
        thread.join(HANG)
    assert order == [0, 1, 2, 3, 4, "again"]
    assert len(lock.waiting) == 0
