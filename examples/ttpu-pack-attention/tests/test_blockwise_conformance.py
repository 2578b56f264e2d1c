"""The pack is held to what the families that it did not write are held to: their own conformance, under the pack."""

from typing import Any

from ttpu_conformance import parametrize_with_checks

COSTLY = ("chunked_prefill", "gradients", "stacked_layers", "sharded_fsdp", "sharded_tensor")


@parametrize_with_checks("llama", patch_packs=["blockwise"], level="quick")
def test_conformance(case: Any, check: Any) -> None:
    check(case)


@parametrize_with_checks("llama", patch_packs=["blockwise"], only=COSTLY)
def test_conformance_of_training_chunks_and_meshes(case: Any, check: Any) -> None:
    check(case)
