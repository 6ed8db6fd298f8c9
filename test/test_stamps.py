# SPDX-License-Identifier: Apache-2.0
"""What time stamps say of a camera."""
import pytest

from lingbot_map_ros.ros.stamps import PERIODS, Order, Stamps

PERIOD = 100_000_000


def orders(stamps: Stamps, stamps_ns) -> list[Order]:
    return [stamps.judge(stamp_ns, 0.0) for stamp_ns in stamps_ns]


def test_even_stamps_are_next_ones():
    stamps = Stamps()
    assert orders(stamps, range(0, 50 * PERIOD, PERIOD)) == [Order.NEXT] * 50
    assert stamps.seconds == pytest.approx(4.9)


def test_the_same_stamp_is_a_duplicate():
    assert orders(Stamps(), (5, 5, 5, 6)) == [Order.NEXT, Order.DUPLICATE, Order.DUPLICATE, Order.NEXT]


def test_any_earlier_stamp_is_a_new_start():
    stamps = Stamps()
    assert orders(stamps, (PERIOD, 2 * PERIOD, 2 * PERIOD - 1, 0, PERIOD)) == [
        Order.NEXT, Order.NEXT, Order.BACK, Order.BACK, Order.NEXT]
    assert stamps.seconds == 0.1


def test_a_gap_is_a_multiple_of_the_usual_period():
    stamps = Stamps()
    orders(stamps, range(PERIOD, 10 * PERIOD, PERIOD))
    assert orders(stamps, (12 * PERIOD, 16 * PERIOD, 17 * PERIOD)) == [Order.NEXT, Order.GAP, Order.NEXT]
    slow = range(20 * PERIOD, 20 * PERIOD + 4 * PERIODS * PERIOD, 4 * PERIOD)
    assert Order.GAP not in orders(stamps, slow)[PERIODS // 2:]  # what is usual has changed
    assert orders(Stamps(), (0, 1, 1_000_000)) == [Order.NEXT] * 3  # nothing is usual yet


def test_after_a_new_start_nothing_is_usual():
    stamps = Stamps()
    orders(stamps, range(PERIOD, 10 * PERIOD, PERIOD))
    assert orders(stamps, (0, 9 * PERIOD)) == [Order.BACK, Order.NEXT]


def test_images_without_stamps_follow_each_other_as_they_arrive():
    stamps = Stamps()
    assert [stamps.judge(0, arrival) for arrival in (50.0, 50.5, 52.0)] == [
        Order.NEXT, Order.UNSTAMPED, Order.UNSTAMPED]
    assert stamps.seconds == pytest.approx(2.0)
    assert orders(stamps, (PERIOD,)) == [Order.NEXT]
