# SPDX-License-Identifier: Apache-2.0
# Sourced by scripts/demo and scripts/test: sets up .venv, and ROS 2 so that nothing leaves this machine or meets another
# run on it. Defines PYTHON; leaves the current folder at the checkout's root.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup || return
PYTHON="$PWD/.venv/bin/python"

if [[ -n "${_ROS_WHEELS_BOOTSTRAP_COMPLETE:-}" ]]; then
  unset _ROS_WHEELS_BOOTSTRAP_COMPLETE LD_LIBRARY_PATH  # left by another environment's ROS 2 wheels
fi

export ROS_AUTOMATIC_DISCOVERY_RANGE=LOCALHOST
export ROS_DOMAIN_ID="${ROS_DOMAIN_ID:-$((1 + RANDOM % 100))}"  # up to 101: ports stay clear of the ephemeral ones
ROS_LOG_DIR="$(mktemp -d -t lingbot_map_log.XXXXXX)"
export ROS_LOG_DIR
trap 'rm -rf "$ROS_LOG_DIR"' EXIT
