"""The teacher of a distillation: another model on the devices of the training, whose weights are read and never
changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.loading import open_model
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.load_options import JaxLoadOptions
from ttpu_jax.model.causal_model import DecoderModel, causal_model
from ttpu_jax.params.quantized import shardings_of
from ttpu_jax.train.held import HeldParameters
from ttpu_jax.train.zero import ZeroPlacements, zero_placements

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM

PLACES = ("mesh", "parallelism_strategy", "sharding_strategy", "plan")
"""Options that say where a model lies, which the student decides."""


@dataclass(frozen=True, eq=False)
class Teacher:
    """A model that another one learns from.

    Attributes:
        model: its decoder.
        params: stacked path → weight, in the dtype of computation or quantized.
    """

    model: DecoderModel
    params: Mapping[str, Any]


def open_teacher(
    source: str | Path,
    given: Mapping[str, Any],
    student: JaxCausalLM,
    zero: ZeroPlacements,
    dtype: np.dtype[Any],
    tokenizer: Any,
) -> Teacher:
    """Load a teacher. Its weights lie on the student's mesh, divided as its strategy says; in stage 3 of ZeRO over all
    devices that rows are divided over.

    Args:
        source: a checkpoint's folder or Hub id.
        given: options of loading by name.
        student: the loaded model whose mesh is used.
        zero: where the student's weights lie.
        dtype: that is computed in.
        tokenizer: the student's, or None.

    Raises:
        RequestError: its vocabulary is not the student's, or an option says where it lies.
        UnsupportedError: the mesh does not divide it.
    """
    placed = [name for name in PLACES if given.get(name) is not None]
    if placed:
        raise RequestError(
            f"teacher_load_options has {', '.join(placed)}, but the teacher lies on the devices of the student, as "
            "parallelism_strategy divides them: leave it out."
        )
    mesh = student.programs.runtime.placement.mesh
    options = JaxLoadOptions.read({"dtype": dtype.name, "purpose": "train", **given, "mesh": mesh}, "jax")
    loaded = cast("JaxCausalLM", open_model(source, options, backend="jax"))
    check_vocabulary(loaded, student, tokenizer)
    spec, runtime = loaded.programs.spec, loaded.programs.runtime
    if spec.embedding.rows != student.programs.spec.embedding.rows:
        raise RequestError(
            f"the teacher {loaded.name} has {spec.embedding.rows:,} rows of its vocabulary on this mesh and the "
            f"student {student.programs.spec.embedding.rows:,}, but their logits are compared one by one: use a mesh "
            "whose tensor axis divides the vocabulary."
        )
    placement = runtime.placement
    if zero.stage == 3 and zero.batch_axes:
        placement = zero_placements(placement, 3).weights
    table = stacked_parameters(spec)
    shardings = {path: shardings_of(placement, path, parameter) for path, parameter in table.items()}
    held = HeldParameters(loaded.spec, spec, loaded.paddings)
    kept = {path: loaded.params[held.copies.get(path, (path,))[0]].dtype for path in table}
    params = held.taken_over(loaded.params, shardings, kept)
    return Teacher(causal_model(spec, replace(runtime, placement=placement, dtype=dtype), stacked=True), params)


def check_vocabulary(teacher: JaxCausalLM, student: JaxCausalLM, tokenizer: Any) -> None:
    """Compare the tokens of a teacher and a student.

    Args:
        teacher: the loaded teacher.
        student: the loaded student.
        tokenizer: the student's, or None.

    Raises:
        RequestError: they are others.
    """
    theirs, ours = teacher.spec.vocab_size, student.spec.vocab_size
    if theirs != ours:
        raise RequestError(
            f"the teacher {teacher.name} has a vocabulary of {theirs:,} tokens and the student {student.name} one of "
            f"{ours:,}, but the probability of each token is compared: use a teacher with the student's vocabulary."
        )
    words = [one.get_vocab() for one in (teacher.tokenizer, tokenizer) if hasattr(one, "get_vocab")]
    if len(words) == 2 and words[0] != words[1]:
        other = next(word for word in {**words[0], **words[1]} if words[0].get(word) != words[1].get(word))
        raise RequestError(
            f"the teacher {teacher.name} and the student {student.name} have as many tokens but not the same ones "
            f"({other!r} is {words[0].get(other)} and {words[1].get(other)}), and the probability of each is compared: "
            "use a teacher with the student's vocabulary."
        )


