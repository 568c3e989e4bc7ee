"""`bench quantize`: what its rows say."""

import numpy as np
import pytest

from forge_async.apps.bench.engine_runs import Cost
from forge_async.apps.bench.quantized import report


def test_medians_stand_side_by_side_with_what_a_load_and_the_format_cost():
    steps = {
        "none": {16: [Cost(0.4, 0.3), Cost(0.2, 0.3), Cost(9.0, 0.3)]},
        "int8": {16: [Cost(0.1, 0.2), Cost(0.1, 0.2), Cost(0.2, 0.2)]},
    }
    loads = {"none": [(0.0, 0.1)], "int8": [(0.5, 0.02), (0.7, 0.04)]}
    scored = {"none": np.array([-1.0, -2.0]), "int8": np.array([-1.5, -1.9])}
    rows = {row["case"]: row for row in report(("none", "int8"), steps, loads, scored).rows}
    assert rows["tokens=16"]["speedup"] == pytest.approx(4) and rows["tokens=16"]["speedup_cpu"] == pytest.approx(1.5)
    assert rows["load/int8"] == {"case": "load/int8", "beside_ms": pytest.approx(600), "pause_ms": pytest.approx(30)}
    assert rows["gap/int8"]["mean_nats"] == pytest.approx(0.3) and rows["gap/int8"]["max_nats"] == pytest.approx(0.5)
