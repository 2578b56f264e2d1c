"""What is known of chips and slices without any TPU, and how their names are read."""

import pytest

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.hardware import (
    CHIPS,
    chip_named,
    chip_of_device_kind,
    chip_of_machine,
    parse_topology,
    slice_sizes,
)


def test_a_slice_is_a_chip_and_its_size() -> None:
    topology = parse_topology("v5e:4x8")
    assert (topology.chip.name, topology.size, topology.slices) == ("v5e", (4, 8), 1)
    assert (topology.num_chips, topology.num_devices, topology.name) == (32, 32, "v5e:4x8")


def test_several_slices_are_written_with_a_star() -> None:
    topology = parse_topology("2*v5e:4x4")
    assert (topology.slices, topology.num_chips, topology.devices_per_slice) == (2, 32, 16)
    assert (topology.name, topology.slice_name) == ("2*v5e:4x4", "v5e:4x4")
    assert parse_topology(" 2 * v5e:4x4") == topology


def test_a_tpu7x_chip_is_two_devices() -> None:
    assert parse_topology("tpu7x:2x2x1").num_devices == 8


@pytest.mark.parametrize(
    ("name", "hosts"),
    [("v5e:1x1", 1), ("v5e:2x4", 1), ("v6e:4x4", 4), ("v5p:2x2x1", 1), ("v5p:2x2x2", 2), ("2*v5e:2x4", 2)],
)
def test_what_one_host_can_hold_is_one_host_and_more_comes_in_fours(name: str, hosts: int) -> None:
    assert parse_topology(name).num_hosts == hosts


@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v5e:8x16", (False, True)),  # only a whole side of the pod closes
        ("v6e:16x16", (True, True)),
        ("v5p:2x2x4", (False, False, False)),
        ("v5p:4x4x8", (True, True, True)),  # whole 4x4x4 cubes
    ],
)
def test_links_close_into_rings_where_the_pod_does(name: str, wraps: tuple[bool, ...]) -> None:
    assert parse_topology(name).wraps == wraps


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "'v9' was asked for.*the chips are v4, v5e, v5p, v6e, tpu7x"),
        ("v5litepod-8:2x4", "write 'v5e', as in 'v5e:2x4'"),
        ("v5e", "size '' is not numbers"),
        ("v5e:2x2x2", "it has 3 dimensions and the interconnect of v5e has 2"),
        ("v5e:32x32", "1024 chips, but a v5e pod has 256"),
        ("0*v5e:2x2", "no slices, but at least 1 is needed: write 1 slice as 'v5e:2x4' or several as '2[*]v5e:2x4'"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_what_does(name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse_topology(name)


def test_every_size_that_is_sold_can_be_parsed_and_grows() -> None:
    for chip in CHIPS.values():
        sizes = [parse_topology(f"{chip.name}:{'x'.join(map(str, size))}") for size in slice_sizes(chip)]
        chips = [size.num_chips for size in sizes]
        assert chips == sorted(set(chips))
        assert chips[-1] == 256


def test_a_size_that_is_not_sold_is_told_from_one_that_is() -> None:
    for name in ("v5e:2x4", "2*v5e:16x16", "tpu7x:2x2x1", "v5p:4x4x8", "v5p:8x8x8", "v4:4x4x12"):
        assert parse_topology(name).is_sold, name
    for name in ("v5e:2x3", "v6e:1x8", "v5p:2x2x3", "v5p:1x1x1", "2*v5e:3x3"):
        assert not parse_topology(name).is_sold, name


def test_a_chip_is_found_by_what_jax_calls_its_devices() -> None:
    for chip in CHIPS.values():
        assert chip_of_device_kind(chip.device_kind) is chip
    assert chip_of_device_kind("TPU v6e") is chip_named("v6e")
    assert chip_of_device_kind("TPU v7x") is chip_named("tpu7x")
    assert chip_of_machine("v5litepod-256") is chip_named("v5e") and chip_of_machine("v5p-8") is chip_named("v5p")
    assert chip_of_machine("v6e") is chip_named("v6e") and chip_of_machine("v3-8") is None
    assert chip_of_device_kind("cpu") is None
    assert chip_of_device_kind("NVIDIA H100") is None


def test_no_figure_of_a_chip_exceeds_what_its_documents_give() -> None:
    """Two links for each dimension; the all-link bandwidth of the documents, both directions, in GB/s for a chip."""
    documents = {"v4": 600, "v5e": 400, "v5p": 1200, "v6e": 800, "tpu7x": 1200}
    for chip in CHIPS.values():
        assert chip.ici_links == 2 * chip.dimensions
        assert chip.ici_links * 2 * chip.ici_bytes_per_second <= documents[chip.name] * 1e9
        assert chip.int8_ops is None or chip.int8_ops == pytest.approx(2 * chip.bf16_flops, rel=0.01)
