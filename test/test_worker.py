# SPDX-License-Identifier: Apache-2.0
"""The mailboxes, the thread that empties them, and the ticker."""
from __future__ import annotations

import math
import threading
import time

import pytest

from lingbot_map_ros.ros import worker as worker_module
from lingbot_map_ros.ros.worker import Inbox, Mailbox, Ticker, Worker

TIMEOUT = 10


class Recorder:
    """What a worker did, with a gate that holds up `process`."""

    def __init__(self) -> None:
        self.items: list = []
        self.errors: list = []
        self.idle = threading.Event()
        self.started = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def process(self, item) -> None:
        self.started.set()
        assert self.gate.wait(TIMEOUT)
        if item == "bad":
            raise ValueError("bad item")
        self.items.append(item)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def worker(recorder):
    inbox = Inbox()
    worker = Worker(inbox, recorder.idle.set, recorder.errors.append, idle_period=0.01)
    worker.mailbox, worker.other = (Mailbox(inbox, recorder.process) for _ in range(2))
    yield worker
    recorder.gate.set()
    worker.stop()


def wait_until(condition) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_when_the_next_item_is_to_be_expected(monkeypatch):
    now = 0.0
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: now)
    inbox = Inbox()
    mailbox, other = Mailbox(inbox, None), Mailbox(inbox, None)
    assert inbox.next_in() == math.inf
    mailbox.put(1)
    assert inbox.next_in() == 0.0, "it waits"
    assert taken(inbox) == 1
    assert inbox.next_in() == math.inf, "one item alone tells nothing"
    now = 2.0
    mailbox.put(2)
    assert taken(inbox) == 2 and inbox.next_in() == 2.0
    now = 3.5
    assert other.next_in() == 0.5, "the worker is the same"
    now = 5.0
    assert inbox.next_in() == 0.0, "overdue"
    now = 6.5
    assert inbox.next_in() == math.inf, "it comes no more"
    for now in (7.0, 7.25):
        other.put(now)
        taken(inbox)
    assert inbox.next_in() == 0.25
    now = 7.75
    mailbox.put(3)
    other.clear()
    assert taken(inbox) == 3 and inbox.next_in() == 5.75


def taken(inbox: Inbox, timeout: float = 0.0):
    """Return the next item, without its mailbox."""
    found = inbox.take(timeout)
    return None if found is None else found[1]


def test_mailbox_keeps_the_newest_and_counts_the_rest():
    mailbox = Mailbox(inbox := Inbox(), print)
    for item in range(4):
        mailbox.put(item)
    assert not mailbox.is_empty
    assert inbox.take(0) == (mailbox, 3)
    assert (taken(inbox), mailbox.displaced, mailbox.is_empty) == (None, 3, True)
    mailbox.put(4)
    mailbox.clear()
    assert (taken(inbox), mailbox.displaced) == (None, 4)


def test_mailboxes_take_turns_however_fast_one_fills():
    inbox = Inbox()
    fast, slow = Mailbox(inbox, print), Mailbox(inbox, print)
    order = []
    fast.put("fast")
    for _ in range(3):
        slow.put("slow")
        fast.put("fast")
        fast.put("fast")
        order += [taken(inbox), taken(inbox)]
        fast.put("fast")
    assert order == ["fast", "slow"] * 3 and slow.displaced == 0
    fast.clear()
    assert taken(inbox) is None


def test_take_waits_for_an_item():
    mailbox = Mailbox(inbox := Inbox(), print)
    threading.Timer(0.05, mailbox.put, ("late",)).start()
    assert taken(inbox, TIMEOUT) == "late"


def test_wake_ends_a_take_and_keeps_the_item():
    mailbox = Mailbox(inbox := Inbox(), print)
    threading.Timer(0.05, inbox.wake).start()
    begin = time.monotonic()
    assert taken(inbox, TIMEOUT) is None and time.monotonic() - begin < TIMEOUT / 2
    mailbox.put("kept")
    inbox.wake()
    assert taken(inbox) is None
    assert taken(inbox) == "kept"


def test_one_busy_mailbox_does_not_starve_the_other(worker, recorder):
    recorder.gate.clear()
    worker.mailbox.put("busy 0")
    assert recorder.started.wait(TIMEOUT)
    worker.mailbox.put("busy 1")
    worker.other.put("other")
    worker.mailbox.put("busy 2")
    recorder.gate.set()
    wait_until(lambda: len(recorder.items) == 3)
    assert recorder.items == ["busy 0", "busy 2", "other"]


def test_items_that_a_busy_worker_cannot_take_are_displaced(worker, recorder):
    recorder.gate.clear()
    worker.mailbox.put(0)
    assert recorder.started.wait(TIMEOUT)
    for item in (1, 2, 3):
        worker.mailbox.put(item)
    recorder.gate.set()
    wait_until(lambda: len(recorder.items) == 2)
    assert recorder.items == [0, 3] and worker.mailbox.displaced == 2


def test_submitted_call_runs_between_items_and_overtakes_the_waiting_one(worker, recorder):
    recorder.gate.clear()
    worker.mailbox.put("first")
    assert recorder.started.wait(TIMEOUT)
    worker.mailbox.put("second")
    future = worker.submit(lambda: recorder.items.append("call") or threading.current_thread().name)
    recorder.gate.set()
    assert future.result(TIMEOUT) != threading.current_thread().name
    wait_until(lambda: len(recorder.items) == 3)
    assert recorder.items == ["first", "call", "second"]


def test_error_of_a_call_goes_to_its_caller(worker):
    def fail():
        raise KeyError("lost")

    with pytest.raises(KeyError):
        worker.submit(fail).result(TIMEOUT)


def test_worker_outlives_a_failing_item(worker, recorder):
    worker.mailbox.put("bad")
    wait_until(lambda: recorder.errors)
    worker.mailbox.put("good")
    wait_until(lambda: recorder.items == ["good"])
    assert [str(error) for error in recorder.errors] == ["bad item"]


def test_idle_runs_without_items(worker, recorder):
    assert recorder.idle.wait(TIMEOUT)


def test_stop_joins_and_cancels_what_waits(recorder):
    inbox = Inbox()
    worker, mailbox = Worker(inbox, recorder.idle.set, recorder.errors.append), Mailbox(inbox, recorder.process)
    recorder.gate.clear()
    mailbox.put("item")
    assert recorder.started.wait(TIMEOUT)
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    wait_until(lambda: worker._stopping)
    future = worker.submit(lambda: "never")
    recorder.gate.set()
    stopper.join(TIMEOUT)
    assert not stopper.is_alive() and recorder.items == ["item"] and future.cancelled()
    assert worker.submit(lambda: None).cancelled()  # it would be waited for in vain


def test_ticker_goes_on_after_an_error_and_takes_a_new_period_at_once():
    ticks, errors = [], []

    def tick():
        ticks.append(threading.current_thread().name)
        raise ValueError(f"tick {len(ticks)}")

    ticker = Ticker(3600.0, tick, errors.append)
    try:
        ticker.set_period(0.01)
        wait_until(lambda: len(errors) >= 3)
    finally:
        ticker.stop()
    count = len(ticks)
    assert [str(error) for error in errors[:3]] == ["tick 1", "tick 2", "tick 3"] and set(ticks) == {"ticker"}
    assert not ticker._thread.is_alive() and len(ticks) == count
