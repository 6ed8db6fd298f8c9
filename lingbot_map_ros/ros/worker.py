# SPDX-License-Identifier: Apache-2.0
"""One thread that owns the model, the one-place mailbox that feeds it, and one for what must go on meanwhile."""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Holds the newest item only. Many threads put, one takes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._item: Item | None = None
        self._woken = False
        self.displaced = 0  # items that a newer one replaced, or that were cleared, before they were taken

    def put(self, item: Item) -> None:
        """Leave an item, in place of one not yet taken."""
        with self._condition:
            self.displaced += self._item is not None
            self._item = item
            self._condition.notify()

    def take(self, timeout: float) -> Item | None:
        """Return the item as soon as there is one; None after `timeout` seconds or a wake()."""
        with self._condition:
            self._condition.wait_for(lambda: self._item is not None or self._woken, timeout)
            if self._woken:
                self._woken = False
                return None
            item, self._item = self._item, None
            return item

    def wake(self) -> None:
        """Let take() return now."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    def clear(self) -> None:
        """Drop the item that waits, if any."""
        with self._condition:
            self.displaced += self._item is not None
            self._item = None


class Worker(Generic[Item]):
    """Runs `process(item)` for the newest item, `idle()` at least every `idle_period` seconds, and submitted calls.

    An exception of `process` or `idle` goes to `failed(error)`, which must not raise; the worker goes on.
    """

    def __init__(
        self,
        mailbox: Mailbox[Item],
        process: Callable[[Item], None],
        idle: Callable[[], None],
        failed: Callable[[Exception], None],
        idle_period: float = 0.1,
    ) -> None:
        """Start the thread."""
        self._mailbox = mailbox
        self._process = process
        self._idle = idle
        self._failed = failed
        self._idle_period = idle_period
        self._calls: deque[tuple[Callable[[], object], Future]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="worker")
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> Future:
        """Run a call between two items; it overtakes an item that waits. Once the worker stops, calls are cancelled."""
        future: Future = Future()
        self._calls.append((call, future))
        if self._stopping:
            future.cancel()
        self._mailbox.wake()
        return future

    def stop(self) -> None:
        """Finish what runs now, cancel what waits, and join the thread."""
        self._stopping = True
        self._mailbox.wake()
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
            item = self._mailbox.take(self._idle_period)
            if self._stopping:
                break
            try:
                if item is not None:
                    self._process(item)
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
