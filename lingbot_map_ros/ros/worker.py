# SPDX-License-Identifier: Apache-2.0
"""One thread that owns the model, the one-place mailboxes that feed it, and one for what must go on meanwhile."""
from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """What waits in a worker's mailboxes: the newest item of each, for one thread to take in turn. Many threads put."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: dict[Mailbox[Item], Item] = {}  # in the order in which the mailboxes' turns come
        self._times: dict[Mailbox[Item], tuple[float, float]] = {}  # of the last item, and since the one before
        self._woken = False

    def put(self, mailbox: Mailbox[Item], item: Item) -> None:
        """Leave an item in place of the mailbox's last one, whose turn it takes."""
        now = time.monotonic()
        with self._condition:
            last, _ = self._times.get(mailbox, (-math.inf, math.inf))
            self._times[mailbox] = now, now - last
            mailbox.displaced += mailbox in self._waiting
            self._waiting[mailbox] = item
            self._condition.notify()

    def drop(self, mailbox: Mailbox[Item]) -> None:
        """Forget the mailbox's item, if it has one."""
        with self._condition:
            mailbox.displaced += self._waiting.pop(mailbox, None) is not None

    def holds(self, mailbox: Mailbox[Item]) -> bool:
        """Say whether an item of the mailbox waits."""
        with self._condition:
            return mailbox in self._waiting

    def next_in(self) -> float:
        """Return the seconds until the next item is to be expected of any mailbox, each as far from its last one as
        that was from the one before.

        0: one waits, or is overdue by less than such an interval. Infinity: none is to be expected.
        """
        now = time.monotonic()
        with self._condition:
            if self._waiting:
                return 0.0
            remaining = ((last + interval - now, interval) for last, interval in self._times.values())
            return min((max(seconds, 0.0) for seconds, interval in remaining if seconds > -interval), default=math.inf)

    def take(self, timeout: float) -> tuple[Mailbox[Item], Item] | None:
        """Return a mailbox and its item as soon as there is one; None after `timeout` seconds or a wake().

        The mailbox that has waited longest comes first, so that a fast camera does not crowd out a slow one.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._woken, timeout)
            if self._woken:
                self._woken = False
                return None
            mailbox = next(iter(self._waiting), None)
            return None if mailbox is None else (mailbox, self._waiting.pop(mailbox))

    def wake(self) -> None:
        """Let take() return now."""
        with self._condition:
            self._woken = True
            self._condition.notify()


class Mailbox(Generic[Item]):
    """Holds the newest item only, which the inbox's worker gives to `process`. For any thread."""

    def __init__(self, inbox: Inbox[Item], process: Callable[[Item], None]) -> None:
        self.process = process
        self.displaced = 0  # items that a newer one replaced, or that were cleared, before they were taken
        self._inbox = inbox

    @property
    def is_empty(self) -> bool:
        """Whether no item waits."""
        return not self._inbox.holds(self)

    def put(self, item: Item) -> None:
        """Leave an item, in place of one not yet taken."""
        self._inbox.put(self, item)

    def next_in(self) -> float:
        """See Inbox.next_in: of all mailboxes, since one worker serves them."""
        return self._inbox.next_in()

    def clear(self) -> None:
        """Drop the item that waits, if any."""
        self._inbox.drop(self)


class Worker(Generic[Item]):
    """Processes the inbox's items, runs `idle()` at least every `idle_period` seconds, and submitted calls.

    An exception of `process` or `idle` goes to `failed(error)`, which must not raise; the worker goes on.
    """

    def __init__(
        self,
        inbox: Inbox[Item],
        idle: Callable[[], None],
        failed: Callable[[Exception], None],
        idle_period: float = 0.1,
    ) -> None:
        """Start the thread."""
        self._inbox = inbox
        self._idle = idle
        self._failed = failed
        self._idle_period = idle_period
        self._calls: deque[tuple[Callable[[], object], Future]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="worker")
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> Future:
        """Run a call between two items; it overtakes items that wait. Once the worker stops, calls are cancelled."""
        future: Future = Future()
        self._calls.append((call, future))
        if self._stopping:
            future.cancel()
        self._inbox.wake()
        return future

    def stop(self) -> None:
        """Finish what runs now, cancel what waits, and join the thread."""
        self._stopping = True
        self._inbox.wake()
        self._thread.join()
        while self._calls:
            self._calls.popleft()[1].cancel()

    def _run(self) -> None:
        while not self._stopping:
            while self._calls:
                call, future = self._calls.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(call())
                except Exception as error:  # it belongs to whoever waits for the future
                    future.set_exception(error)
            taken = self._inbox.take(self._idle_period)
            if self._stopping:
                break
            try:
                if taken is not None:
                    mailbox, item = taken
                    mailbox.process(item)
                self._idle()
            except Exception as error:
                self._failed(error)


class Ticker:
    """Calls `tick()` every `period` seconds of real time on a thread of its own, whatever the executor is busy with.

    An exception goes to `failed(error)`, which must not raise; the ticker goes on.
    """

    def __init__(self, period: float, tick: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Start the thread; the first call comes after one period."""
        self._period = period
        self._tick = tick
        self._failed = failed
        self._changed = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ticker")
        self._thread.start()

    def set_period(self, period: float) -> None:
        """Let a new period begin now."""
        self._period = period
        self._changed.set()

    def stop(self) -> None:
        """Finish what runs now and join the thread."""
        self._stopping = True
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            if self._changed.wait(self._period):
                self._changed.clear()
                continue
            try:
                self._tick()
            except Exception as error:
                self._failed(error)
