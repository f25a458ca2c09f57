"""Pages of a GPU's cache on the host, for sums."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.gpu


def test_rows_of_a_gpu_arrive_on_the_host() -> None:
    import torch

    from vllm_pd_connector.worker.staging.cuda import device_rows

    memory = torch.randint(0, 256, (4096,), dtype=torch.uint8, device="cuda")
    rows = np.array([7, 0, 3])
    found = device_rows(memory.data_ptr() + 16, 100, 60, rows, memory.device.index or 0)
    host = memory.cpu().numpy()
    assert (found == np.stack([host[16 + 100 * row :][:60] for row in rows])).all()
