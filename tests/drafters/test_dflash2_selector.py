"""The lattice by hand: codebook rows of the tokens before, gates, and who walks it."""

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.drafters.dflash2.operations import Operations, device_operations, host_operations
from lse_mlx.drafters.dflash2.selector import Selector
from lse_mlx.drafters.dflash2.weights import Matrix
from lse_mlx.kernels.registry import Registry
from tests.kernels.modes import needs_compiler, own_registry
from tests.metal_host.host import MetalHost


def on_host() -> Operations:
    return host_operations(Registry("reference"))


def in_mlx() -> Operations:
    return device_operations(Registry("reference"))


def on_device() -> Operations:
    return device_operations(own_registry(MetalHost().metal_kernel))


@pytest.mark.parametrize("form", [on_host, in_mlx, pytest.param(on_device, marks=needs_compiler)])
def test_a_lattice_by_hand(form) -> None:
    """Rank 2, two candidates, two positions; position 0 stands after the anchor."""
    operations: Operations = form()
    codebook = Matrix(mx.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 3.0]]))
    selector = Selector(operations, lambda hidden: 2 * hidden, codebook, codebook, vocab_size=4)
    ids = mx.array([[0, 1], [2, 3]], mx.int32)
    lattice = selector.lattice(
        hidden=operations.own(mx.array([[1.0, 0.5], [0.5, 1.0]])),
        logits=mx.array([[10.0, 20.0], [30.0, 40.0]]),
        ids=ids,
        anchor=3,
    )
    # Gates [2, 1] and [1, 2]. After 3: [1, 3] * [2, 1] = [2, 3] against [1, 0] and [0, 1].
    after_anchor = [10 + 2, 20 + 3]
    # After 0: [1, 0] * [1, 2] against [2, 1] and [1, 3]; after 1: [0, 1] * [1, 2] = [0, 2].
    scores = [[after_anchor] * 2, [[30 + 2, 40 + 1], [30 + 2, 40 + 6]]]
    np.testing.assert_array_equal(np.array(lattice.scores), scores)
    np.testing.assert_array_equal(np.array(lattice.ids), np.array(ids))
    if operations.on_host:
        assert lattice.path is None, "the walk is NumPy's"
    else:
        assert lattice.path is not None
        assert lattice.path.tolist() == [1, 3, 0]
    (served,) = operations.registry.served.elements()
    assert served == ("selector", operations.registry.form)
