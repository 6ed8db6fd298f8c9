# SPDX-License-Identifier: Apache-2.0
"""Replays recorded images through a session, without ROS, and measures what comes of them."""
