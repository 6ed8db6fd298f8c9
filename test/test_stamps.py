# SPDX-License-Identifier: Apache-2.0
"""What time stamps say of a camera."""
import pytest

from lingbot_map_ros.ros.stamps import MAX_LATE, PERIODS, Order, RateLimit, Stamps

PERIOD = 100_000_000


def orders(stamps: Stamps, stamps_ns) -> list[Order]:
    return [stamps.judge(stamp_ns, 0.0) for stamp_ns in stamps_ns]


def test_even_stamps_are_next_ones():
    stamps = Stamps()
    assert orders(stamps, range(0, 50 * PERIOD, PERIOD)) == [Order.NEXT] * 50
    assert stamps.seconds == pytest.approx(4.9)


def test_the_same_stamp_is_a_duplicate():
    assert orders(Stamps(), (5, 5, 5, 6)) == [Order.NEXT, Order.DUPLICATE, Order.DUPLICATE, Order.NEXT]


def test_a_stamp_a_second_earlier_is_a_new_start():
    stamps = Stamps()
    assert orders(stamps, (30 * PERIOD, 31 * PERIOD, 21 * PERIOD, 22 * PERIOD)) == [
        Order.NEXT, Order.NEXT, Order.BACK, Order.NEXT]
    assert stamps.seconds == 2.2


def test_a_slightly_earlier_stamp_is_late():
    stamps = Stamps()
    assert orders(stamps, (30 * PERIOD, 31 * PERIOD, 21 * PERIOD + 1, 31 * PERIOD - 1)) == [
        Order.NEXT, Order.NEXT, Order.LATE, Order.LATE]
    assert stamps.seconds == 3.1
    assert orders(stamps, (31 * PERIOD, 32 * PERIOD)) == [Order.DUPLICATE, Order.NEXT]


def test_stamps_that_stay_slightly_back_are_a_new_start():
    stamps = Stamps()
    orders(stamps, range(30 * PERIOD, 40 * PERIOD, PERIOD))
    for start in (35, 32):  # the second time from what has become the newest
        found = orders(stamps, range(start * PERIOD, (start + 1) * PERIOD, PERIOD // 10))
        assert found == [Order.LATE] * (MAX_LATE - 1) + [Order.BACK] + [Order.NEXT] * (10 - MAX_LATE)
    now_and_then = [n * PERIOD for n in range(40, 60) for n in (n, n - 1)]
    assert Order.BACK not in orders(stamps, now_and_then)


def test_a_gap_is_a_multiple_of_the_usual_period():
    stamps = Stamps()
    orders(stamps, range(PERIOD, 10 * PERIOD, PERIOD))
    assert orders(stamps, (12 * PERIOD, 16 * PERIOD, 17 * PERIOD)) == [Order.NEXT, Order.GAP, Order.NEXT]
    slow = range(20 * PERIOD, 20 * PERIOD + 4 * PERIODS * PERIOD, 4 * PERIOD)
    assert Order.GAP not in orders(stamps, slow)[PERIODS // 2:]  # what is usual has changed
    assert orders(Stamps(), (0, 1, 1_000_000)) == [Order.NEXT] * 3  # nothing is usual yet


def test_after_a_new_start_nothing_is_usual():
    stamps = Stamps()
    orders(stamps, range(20 * PERIOD, 30 * PERIOD, PERIOD))
    assert orders(stamps, (PERIOD, 19 * PERIOD)) == [Order.BACK, Order.NEXT]


def test_images_without_stamps_follow_each_other_as_they_arrive():
    stamps = Stamps()
    assert [stamps.judge(0, arrival) for arrival in (50.0, 50.5, 52.0)] == [
        Order.NEXT, Order.UNSTAMPED, Order.UNSTAMPED]
    assert stamps.seconds == pytest.approx(2.0)
    assert orders(stamps, (PERIOD,)) == [Order.NEXT]


def test_single_images_without_a_stamp_are_no_new_start():
    stamps = Stamps()
    assert orders(stamps, (50 * PERIOD, 0, 51 * PERIOD, 0, 0, 52 * PERIOD)) == [
        Order.NEXT, Order.UNSTAMPED, Order.NEXT, Order.UNSTAMPED, Order.UNSTAMPED, Order.NEXT]


@pytest.mark.parametrize(("camera", "rate", "taken"), [
    (30, 0, 300), (30, 10, 100), (30, 30, 300), (30, 7, 70), (5, 10, 50)])
def test_rate_is_limited_on_average_though_stamps_jitter(camera, rate, taken):
    import random

    jitter, limit = random.Random(0), RateLimit()
    count = sum(limit.takes(100 + (i + jitter.uniform(-0.05, 0.05)) / camera, rate) for i in range(10 * camera))
    assert count == pytest.approx(taken, rel=0.03)


def test_another_rate_takes_effect_at_once():
    limit = RateLimit()
    assert limit.takes(0.0, 0.001) and not limit.takes(10.0, 0.001)
    assert limit.takes(10.1, 10.0) and not limit.takes(10.15, 10.0) and limit.takes(10.16, 0.0)
