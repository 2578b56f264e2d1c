"""Predicted time: rooflines that can be computed by hand, rings and lines, and an order of meshes that makes sense."""

from dataclasses import replace
from itertools import product

import pytest
from test_plan_memory import LLAMA, published, sharing

from ttpu_core.sharding.hardware import CHIPS, Topology, parse_topology
from ttpu_core.sharding.links import HOP_SECONDS, collective_seconds, slice_axes
from ttpu_core.sharding.parallelism import parse_rules, strategy_with
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY
from ttpu_core.sharding.torus import Torus
from ttpu_core.sharding.training_state import REMATS, UpdateSettings
from ttpu_plan.cost import HBM_SHARE, MXU_SHARE, estimate_time
from ttpu_plan.links import LINE, links_of
from ttpu_plan.workload import Workload

DECODE = Workload("decode", 32, 2048)
PREFILL = Workload("prefill", 1, 2048)
TRAIN = Workload("train", 64, 2048, layers="scan")


def test_a_decode_step_takes_as_long_as_reading_weights_and_cache() -> None:
    spec, topology = published(LLAMA), parse_topology("v6e:1x1")
    read = 2 * (spec.num_parameters - spec.vocab_size * spec.hidden_size) + spec.kv_bytes_per_token(2) * 32 * 2048
    estimate = estimate_time(spec, {}, topology, DECODE)
    assert estimate.seconds == pytest.approx(read / topology.chip.hbm_bytes_per_second / HBM_SHARE, rel=0.02)
    assert (estimate.bound, estimate.ici, estimate.dcn) == ("hbm", 0.0, 0.0)


def test_projections_between_stream_and_tables_are_multiplied_and_read() -> None:
    spec, chip = published(LLAMA), parse_topology("v6e:1x1")
    times = {}
    for features in (None, spec.hidden_size):
        embedding = replace(spec.embedding, table_features=features)
        times[features] = estimate_time(replace(spec, embedding=embedding), {}, chip, PREFILL)
    both = 2 * spec.hidden_size**2
    more = times[spec.hidden_size].compute - times[None].compute
    assert more == pytest.approx(2 * both * 2048 / chip.chip.bf16_flops / MXU_SHARE)
    more = times[spec.hidden_size].hbm - times[None].hbm
    assert more == pytest.approx(2 * both / chip.chip.hbm_bytes_per_second / HBM_SHARE)


def test_what_layers_share_is_read_and_multiplied_by_each() -> None:
    spec, topology = published(LLAMA), parse_topology("v6e:2x4")
    for workload in (DECODE, PREFILL):
        assert estimate_time(sharing(spec), {"tensor": 8}, topology, workload) == estimate_time(
            spec, {"tensor": 8}, topology, workload
        )
    trained, apart = (estimate_time(each, {"fsdp": 8}, topology, TRAIN) for each in (sharing(spec), spec))
    assert trained.compute == apart.compute
    assert trained.hbm < apart.hbm  # one block is updated
    alone = replace(spec, layers=spec.layers[:1])
    assert estimate_time(sharing(alone), {"fsdp": 8}, topology, TRAIN) == estimate_time(
        alone, {"fsdp": 8}, topology, TRAIN
    )


def test_a_prefill_takes_as_long_as_its_products() -> None:
    spec, topology = published(LLAMA), parse_topology("v6e:1x1")
    matrices = spec.num_parameters - 2 * spec.vocab_size * spec.hidden_size
    attention = 2 * 32 * 128 * 2048 * 2048 * spec.num_layers  # causal: half of 4 · heads · dim · tokens²
    flops = 2 * matrices * 2048 + attention
    estimate = estimate_time(spec, {}, topology, PREFILL)
    assert estimate.compute == pytest.approx(flops / topology.chip.bf16_flops / MXU_SHARE, rel=0.02)
    assert estimate.bound == "compute"


def test_training_multiplies_three_times_and_again_what_is_not_kept() -> None:
    """An MLP's last product is never computed again: its result goes to the residual stream alone."""
    spec, topology = published(LLAMA), parse_topology("v5p:4x4x4")
    kernel = 4096 * 14336
    projections, attention = 4096 * (6144 + 4096), 2 * 4096 * 1024  # causal: half of 2048 tokens
    again = {
        "full": projections + attention + 2 * kernel,
        "attention": 2 * kernel,
        "gate": kernel,
        "dots": attention,
        "mlp": 0,
        "none": 0,
    }
    head = 4 * spec.vocab_size * spec.hidden_size
    assert tuple(again) == REMATS
    for remat, elements in again.items():
        update = UpdateSettings(remat=remat)
        found = estimate_time(spec, {"fsdp": 64}, topology, replace(TRAIN, update=update))
        layer = 3 * (projections + attention + 3 * kernel) + elements
        flops = 2 * 2048 * (head + spec.num_layers * layer)
        assert found.compute == pytest.approx(flops / topology.chip.bf16_flops / MXU_SHARE, rel=1e-3), remat


def test_a_dense_layer_sums_twice_over_its_tensor_axis() -> None:
    """Two all-reduces a layer (arXiv 1909.08053), and an all-gather for what was looked up in parts of rows."""
    spec, topology = published(LLAMA), parse_topology("v5e:2x4")
    estimate = estimate_time(spec, {"tensor": 8}, topology, DECODE)
    size, link = 32 * spec.hidden_size * 2, topology.chip.ici_bytes_per_second
    each, gathered = (collective_seconds(op, size, 8, link) for op in ("all-reduce", "all-gather"))
    assert estimate.ici == pytest.approx(2 * spec.num_layers * each + gathered, rel=1e-6)


@pytest.mark.parametrize(("rules", "op"), [("looked_up=tensor", "all-reduce"), ("looked_up=none", None)])
def test_rules_say_how_a_table_is_divided_that_is_only_looked_up(rules: str, op: str | None) -> None:
    spec, topology = published(LLAMA), parse_topology("v5e:2x4")
    strategy = strategy_with(parse_rules(rules), DEFAULT_STRATEGY)
    estimate = estimate_time(spec, {"tensor": 8}, topology, DECODE, strategy)
    size, link = 32 * spec.hidden_size * 2, topology.chip.ici_bytes_per_second
    each = collective_seconds("all-reduce", size, 8, link)
    of_table = 0.0 if op is None else collective_seconds(op, size, 8, link)
    assert estimate.ici == pytest.approx(2 * spec.num_layers * each + of_table, rel=1e-6)


def test_the_sums_of_a_long_prompts_mlps_are_hidden_behind_products() -> None:
    """Of two sums a layer one goes round while the layer multiplies. What was looked up is exchanged alone."""
    spec, topology = published(LLAMA), parse_topology("v5e:2x4")
    size, link = 2048 * spec.hidden_size * 2, topology.chip.ici_bytes_per_second
    each, gathered = (collective_seconds(op, size, 8, link) for op in ("all-reduce", "all-gather"))
    cut = estimate_time(spec, {"tensor": 8}, topology, PREFILL)
    assert cut.ici == pytest.approx(2 * spec.num_layers * each + gathered, rel=1e-6)
    exposed = spec.num_layers * each + gathered
    assert cut.compute + exposed < cut.seconds < cut.compute + exposed + cut.hbm
    for workload in (replace(PREFILL, context=2047), replace(PREFILL, context=512)):
        whole = estimate_time(spec, {"tensor": 8}, topology, workload)
        assert whole.seconds >= whole.compute + whole.ici, workload


def test_fully_sharded_weights_are_gathered_twice_and_their_gradients_scattered_once() -> None:
    spec, topology = published(LLAMA), parse_topology("v5p:4x4x4")  # all dimensions close: three rings
    estimate = estimate_time(spec, {"fsdp": 64}, topology, TRAIN)
    link = 3 * 2 * topology.chip.ici_bytes_per_second
    layers = 2 * (spec.num_parameters - 2 * spec.vocab_size * spec.hidden_size)
    ends = 2 * 2 * spec.vocab_size * spec.hidden_size
    bytes_alone = 3 * (layers + ends) * 63 / 64 / link
    hops = 63 * HOP_SECONDS * 2 * (spec.num_layers * 6 + 3)  # of a gather and a scatter for each parameter
    assert bytes_alone < estimate.ici < bytes_alone + hops


def test_the_core_sums_gradients_that_go_around_a_ring_where_no_sparse_cores_do() -> None:
    spec, topology = published(LLAMA), parse_topology("v5e:4x4")
    other = replace(topology, chip=replace(topology.chip, sums_on_sparse_cores=True))
    by_core, apart = (estimate_time(spec, {"fsdp": 16}, each, TRAIN) for each in (topology, other))
    kernels = sum(
        one.size for path, one in spec.parameters.items() if path.startswith("layers.") and path.endswith(".kernel")
    )
    moved = 3 * 2 * kernels / (topology.chip.hbm_bytes_per_second * HBM_SHARE)
    assert by_core.hbm - apart.hbm == pytest.approx(moved, rel=1e-3)
    assert by_core.seconds - apart.seconds == pytest.approx(moved, rel=1e-3)
    assert by_core.compute == apart.compute


def test_a_mixture_multiplies_the_chosen_experts_and_reads_those_that_are_reached() -> None:
    spec, topology = published("ttpu_mistral/configs/mixtral-8x7b.json"), parse_topology("v5p:2x2x1")
    chip = topology.chip
    active = 2 * (spec.num_active_parameters - spec.vocab_size * spec.hidden_size)
    one = estimate_time(spec, {"tensor": 4}, topology, Workload("decode", 1, 1024))
    assert one.compute < 1.2 * active / 4 / chip.bf16_flops / MXU_SHARE
    assert one.hbm == pytest.approx(active / 4 / chip.hbm_bytes_per_second / HBM_SHARE, rel=0.05)
    many = estimate_time(spec, {"tensor": 4}, topology, Workload("decode", 32, 1024))
    assert many.hbm > 2 * spec.num_parameters / 4 / chip.hbm_bytes_per_second


def test_slices_exchange_gradients_over_the_data_centre_network() -> None:
    spec = published(LLAMA)
    near = estimate_time(spec, {"data": 2, "fsdp": 16}, parse_topology("v5e:4x8"), TRAIN)
    far = estimate_time(spec, {"data": 2, "fsdp": 16}, parse_topology("2*v5e:4x4"), TRAIN)
    assert near.dcn == 0.0
    # Each device sends its sixteenth of the gradients to its like in the other slice. Eight chips share a host's cards.
    sent = 2 * spec.num_parameters / 16 * 2 * (1 / 2)
    assert far.dcn == pytest.approx(sent / (CHIPS["v5e"].dcn_bytes_per_second / 8), rel=0.1)


def test_a_pod_has_the_network_that_is_published() -> None:
    """cloud.google.com/tpu/docs/v5e: "Data center network bandwidth per Pod: 6.4 Tbps"; v5p: 50 Gbps a chip, tpu7x:
    100."""
    assert 256 * CHIPS["v5e"].dcn_share == pytest.approx(6.4e12 / 8)
    assert CHIPS["v5p"].dcn_share == pytest.approx(50e9 / 8)
    assert 2 * CHIPS["tpu7x"].dcn_share == pytest.approx(100e9 / 8)


def test_an_optimizers_state_on_the_host_goes_over_its_bus() -> None:
    """Two moments in float32, of sixteen devices. Each way has a bandwidth of its own."""
    spec, topology = published(LLAMA), parse_topology("v5e:4x4")
    near, far = (
        estimate_time(spec, {"fsdp": 16}, topology, replace(TRAIN, update=UpdateSettings(offload_optimizer=offload)))
        for offload in (False, True)
    )
    bus = 8 * spec.num_parameters / 16 / CHIPS["v5e"].host_bytes_per_second
    in_hbm = (8 + 2 + 16) * spec.num_parameters / 16 / CHIPS["v5e"].hbm_bytes_per_second / HBM_SHARE
    assert far.seconds - near.seconds == pytest.approx(bus - in_hbm, rel=0.02)
    assert (near.host, far.host) == (0.0, pytest.approx(bus, rel=0.01))
    few = replace(TRAIN, batch=16, context=128, update=UpdateSettings(offload_optimizer=True))
    assert estimate_time(spec, {"fsdp": 16}, parse_topology("v5p:2x2x4"), few).bound == "host"


def test_tensor_parallelism_over_slices_is_slower_than_inside_one() -> None:
    spec, topology = published(LLAMA), parse_topology("2*v5e:2x4")
    inside = estimate_time(spec, {"data": 2, "tensor": 8}, topology, DECODE)
    across = estimate_time(spec, {"data": 2, "tensor": 8}, topology, DECODE, dcn={"tensor": 2})
    assert inside.dcn == 0.0
    assert across.dcn > 0.0
    assert across.seconds > 1.3 * inside.seconds


def test_a_closed_dimension_is_a_ring_and_an_open_one_half_of_it() -> None:
    v5e, v5p = CHIPS["v5e"], CHIPS["v5p"]
    assert links_of({"fsdp": 16}, Topology(v5e, (1, 16))).rings == {"fsdp": 1.0}
    assert links_of({"fsdp": 8}, Topology(v5e, (1, 8))).rings == {"fsdp": LINE}
    assert links_of({"fsdp": 8}, Topology(v5e, (2, 4))).rings == {"fsdp": 1.0}  # around the edge of the grid
    assert links_of({"fsdp": 256}, Topology(v5e, (16, 16))).rings == {"fsdp": 2.0}
    assert links_of({"fsdp": 16, "tensor": 4}, Topology(v5p, (4, 4, 4))).rings == {"fsdp": 2.0, "tensor": 1.0}


def test_the_last_axis_gets_whole_dimensions_before_the_others() -> None:
    links = links_of({"data": 8, "tensor": 2}, Topology(CHIPS["v5e"], (4, 4)))
    assert set(links.rings) == {"data", "tensor"}
    assert links.rings["tensor"] == LINE


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("v5e:2x4", {"fsdp": 2, "expert": 4}),
        ("v5e:4x8", {"fsdp": 4, "expert": 8}),
        ("v5e:16x16", {"fsdp": 16, "expert": 16}),
        ("v5p:4x4x4", {"fsdp": 4, "expert": 16}),
    ],
)
def test_an_exchange_takes_as_long_as_its_busiest_link(name: str, mesh: dict[str, int]) -> None:
    topology = parse_topology(name)
    places = tuple(product(*map(range, topology.size)))
    torus = Torus(places, topology.size, topology.wraps, topology.chip.ici_bytes_per_second)
    size = mesh["expert"]
    groups = [range(first, first + size) for first in range(0, topology.num_devices, size)]  # the last dimensions
    ici, dcn = links_of(mesh, topology).seconds("ragged-all-to-all", 2**28, ("expert",))
    assert (ici, dcn) == (pytest.approx(torus.all_to_all_seconds(2**28, groups), rel=0.05), 0.0)


def test_an_exchange_between_slices_sends_what_goes_there() -> None:
    topology = parse_topology("2*v5e:4x4")
    links = links_of({"expert": 32}, topology, {"expert": 2})
    rate = topology.chip.dcn_bytes_per_second / 8
    assert links.seconds("ragged-all-to-all", 2**28, ("expert",))[1] == pytest.approx(2**27 / rate, rel=0.01)


def test_slices_lie_along_the_axes_that_talk_least() -> None:
    assert slice_axes({"data": 4, "fsdp": 8}, 2) == {"data": 2}
    assert slice_axes({"data": 2, "fsdp": 8}, 4) == {"data": 2, "fsdp": 2}
    assert slice_axes({"tensor": 8}, 1) == {}


def test_a_ring_all_reduce_moves_twice_the_bytes_and_pays_its_hops() -> None:
    seconds = collective_seconds("all-reduce", 2**20, 4, 45e9)
    assert seconds == pytest.approx(1.5 * 2**20 / (2 * 45e9) + 3 * HOP_SECONDS)
    assert collective_seconds("all-gather", 2**20, 1, 45e9) == 0.0
