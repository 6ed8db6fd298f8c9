# SPDX-License-Identifier: Apache-2.0
"""Work beside the model's: what it waits for, and what it does not."""
import pytest
import torch

from lingbot_map_ros.mapping.side_stream import SideStream

LONG = 2_000_000_000  # cycles, about a second


def test_on_a_cpu_nothing_changes():
    beside = SideStream(torch.device("cpu"))
    beside.mark()
    values = torch.zeros(3)
    with beside.running():
        values += 1
    with pytest.raises(ValueError, match="as it is"), beside.running():
        raise ValueError("as it is")
    assert values.tolist() == [1, 1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_what_was_marked_is_waited_for_alone():
    device = torch.device("cuda")
    values, beside = torch.zeros(1 << 20, device=device), SideStream(device)
    torch.cuda._sleep(LONG // 10)
    values.fill_(1)
    beside.mark()
    torch.cuda._sleep(LONG)
    values.fill_(2)
    with beside.running():
        seen = values.clone()
    assert not torch.cuda.current_stream().query(), "the long work is not waited for"
    assert (seen == 1).all(), "it is in time"
    torch.cuda.synchronize()
    assert (values == 2).all() and (seen == 1).all()
