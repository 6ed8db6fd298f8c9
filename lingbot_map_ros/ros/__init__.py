# SPDX-License-Identifier: Apache-2.0
"""The ROS 2 side: messages to arrays and back, parameters, diagnostics, the node."""
