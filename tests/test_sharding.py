"""Meshes: expert groups inside domains, nothing idle by accident, errors that say what would work."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from mok_jax.sharding import expert_groups, logical_axis_rules, make_mesh, pad_experts


@pytest.fixture
def devices():
    return jax.devices("cpu")


def positions(mesh, devices):
    """The mesh as indices into ``devices``."""
    return np.vectorize(devices.index)(mesh.devices)


def test_expert_groups_are_consecutive_devices(devices):
    mesh = make_mesh(expert_parallelism=4, devices=devices[:8])
    assert mesh.axis_names == ("data", "expert")
    assert mesh.are_all_axes_auto
    np.testing.assert_array_equal(positions(mesh, devices), np.arange(8).reshape(2, 4))


def test_default_is_a_whole_domain(devices):
    assert make_mesh(devices=devices[:6]).devices.shape == (1, 6)
    assert make_mesh(devices=devices[:6], domain_size=3).devices.shape == (2, 3)


def test_groups_stay_inside_domains(devices):
    mesh = make_mesh(expert_parallelism=4, domain_size=6, devices=devices[:12], allow_idle=True)
    np.testing.assert_array_equal(positions(mesh, devices), [[0, 1, 2, 3], [6, 7, 8, 9]])


def test_a_short_last_domain_is_used(devices):
    mesh = make_mesh(expert_parallelism=2, domain_size=4, devices=devices[:6])
    np.testing.assert_array_equal(positions(mesh, devices), [[0, 1], [2, 3], [4, 5]])


def test_tensor_axis_is_innermost(devices):
    mesh = make_mesh(expert_parallelism=2, tensor_parallelism=3, domain_size=7, devices=devices[:14], allow_idle=True)
    assert mesh.axis_names == ("data", "expert", "tensor") and mesh.are_all_axes_auto
    np.testing.assert_array_equal(positions(mesh, devices), [[[0, 1, 2], [3, 4, 5]], [[7, 8, 9], [10, 11, 12]]])
    assert make_mesh(tensor_parallelism=2, devices=devices[:8]).devices.shape == (1, 4, 2)


class Gpu(NamedTuple):
    """As JAX lists GPUs of several hosts."""

    id: int
    slice_index: int


def test_a_domain_is_what_xla_found_connected():
    """Two racks of 6 whose hosts started in turn, and a domain is at most 4."""
    gpus = [Gpu(n, n // 2 % 2) for n in range(12)]
    first, second = ([gpu for gpu in gpus if gpu.slice_index == index] for index in (0, 1))
    assert expert_groups(gpus, None, 72, allow_idle=False) == [first, second]
    assert expert_groups(gpus, 2, 4, allow_idle=False) == [r[i : i + 2] for r in (first, second) for i in (0, 2, 4)]
    with pytest.raises(ValueError, match=r"expert_parallelism=8 must be from 1 to the 6 devices of one domain"):
        expert_groups(gpus, 8, 72, allow_idle=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tensor_parallelism": 0}, r"tensor_parallelism=0 must be from 1 to the 8 devices .* nearest is 1"),
        ({"tensor_parallelism": 9}, r"tensor_parallelism=9 .* nearest is 8"),
        ({"tensor_parallelism": 3}, r"tensor_parallelism=3 would leave devices idle in a domain of 8; .* is 4"),
        ({"tensor_parallelism": 2, "expert_parallelism": 5}, r"expert_parallelism=5 .* 8 / 2 devices .* nearest is 4"),
        ({"tensor_parallelism": 2, "expert_parallelism": 3}, r"expert_parallelism=3 would leave .* of 8; .* is 4"),
        ({"expert_parallelism": 5}, r"expert_parallelism=5 would leave devices idle in a domain of 8; .* is 4"),
        ({"expert_parallelism": 7}, r"expert_parallelism=7 .* is 8"),
        ({"expert_parallelism": 9}, r"expert_parallelism=9 must be from 1 to the 8 devices .* nearest is 8"),
        ({"expert_parallelism": 0}, r"expert_parallelism=0 .* nearest is 1"),
        ({"expert_parallelism": 8, "domain_size": 4}, r"expert_parallelism=8 .* 4 devices .* nearest is 4"),
        ({"expert_parallelism": 3, "domain_size": 6}, r"expert_parallelism=3 .* domain of 2 or 6; .* is 2"),
        ({"domain_size": 0}, r"domain_size=0 .* nearest is 1"),
    ],
)
def test_errors_name_argument_value_and_nearest(devices, arguments, text):
    with pytest.raises(ValueError, match=text):
        make_mesh(devices=devices[:8], **arguments)


def test_no_devices():
    with pytest.raises(ValueError, match=r"devices=\[\]"):
        make_mesh(devices=[])


def test_logical_axis_rules(devices):
    mesh = make_mesh(expert_parallelism=4, devices=devices[:8])
    assert logical_axis_rules(mesh) == (("exp", "expert"), ("embed", None), ("mlp", None))
    assert logical_axis_rules(mesh, ("data", "expert"))[0] == ("exp", ("data", "expert"))
    with pytest.raises(ValueError, match=r"expert_axis='model' is not in the mesh; its axes are \('data', 'expert'\)"):
        logical_axis_rules(mesh, "model")


@pytest.mark.parametrize("num_experts", [1, 8, 71, 72, 256, 384, 512])
def test_padded_experts_are_the_next_multiple(num_experts):
    for ranks in range(1, min(num_experts, 80) + 1):
        padded, padding = pad_experts(num_experts, ranks)
        assert padded % ranks == 0
        assert padded - padding == num_experts
        assert 0 <= padding < ranks


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1), r"num_experts=0 .* nearest is 1"),
        ((8, 0), r"expert_parallelism=0 .* nearest is 1"),
        ((8, 72), r"expert_parallelism=72 must be from 1 to the number of experts \(8\); the nearest is 8"),
    ],
)
def test_padding_errors(arguments, text):
    with pytest.raises(ValueError, match=text):
        pad_experts(*arguments)
