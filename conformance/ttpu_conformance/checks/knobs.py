"""A check of the knobs that a plugin's author never turned: the kit turns every key of the config class by itself and
compares logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ttpu_conformance.automatic import Knob, knobs, named, over
from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.declaration import Variant
from ttpu_conformance.diagnosis import diagnose
from ttpu_conformance.errors import CheckFailure, NotApplicable, NotProven, fail
from ttpu_conformance.measure import FLOAT32, Measured, relative_error
from ttpu_conformance.model_under_test import RunsReferenceCode
from ttpu_core.config.key_audit import refuse_ignored
from ttpu_core.errors import ConfigError, TTPUError, UnsupportedError

Status = Literal["turned", "without effect", "refused by transformers", "refused by the plugin", "wrong"]

DIAGNOSED = 2
"""Failures that are diagnosed; each diagnosis takes seconds."""
PROGRAMS = 24
"""Settings after which compiled programs are dropped."""


@dataclass
class Turned:
    """What came of all settings: names by status, the largest error, and the failures' sentences."""

    names: dict[Status, list[str]] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@check("numerics", scope="type", quick="full")
def check_every_knob(case: Case) -> Measured:
    """Logits in float32 equal those of transformers with every other setting of every key of the config class that both
    sides accept.

    Raises:
        CheckFailure: they differ for some settings; the message names them and diagnoses the first ones.
        NotApplicable: the text model of this type is one of another type, or the model runs transformers' code.
    """
    if case.wraps_text_model:
        raise NotApplicable("the knobs of its text model are turned for that model's own type")
    if isinstance(case.model, RunsReferenceCode):
        raise NotApplicable("this backend runs the code of transformers, which no description changes")
    turned = Turned()
    never = [knob.key for knob in knobs(case) if not _turn(case, knob, turned)]
    case.backend.forget_programs()
    details: dict[str, list[str]] = {str(status): names for status, names in turned.names.items()}
    details["never varied"] = never
    if turned.failures:
        fail(" ".join(turned.failures), error=max(turned.errors, default=None), tolerance=FLOAT32)
    shown: tuple[Status, ...] = ("without effect", "refused by the plugin")
    lists = [f"{status}: {', '.join(turned.names[status])}" for status in shown if turned.names.get(status)]
    note = "; ".join([f"never varied: {', '.join(never) or 'no key'}", *lists])
    return Measured(max(turned.errors, default=None), FLOAT32, note=note, details=details)


def _turn(case: Case, knob: Knob, turned: Turned) -> bool:
    """Try a knob's settings over the base; those without effect, or that do not fit it, over the declared variants too,
    which may switch on what it belongs to. Returns whether transformers accepted any."""
    accepted = False
    for setting in knob.settings:
        for start in case.declaration.variants:
            variant = over(start, setting)
            status = _compare(case, start, variant, turned)
            if status not in ("without effect", "refused by transformers"):
                break
        found = status in ("turned", "wrong")
        turned.names.setdefault(status, []).append(variant.name if found else named(setting))
        accepted = accepted or status != "refused by transformers"
        if accepted and knob.one:
            break
    return accepted


def _compare(case: Case, start: Variant, variant: Variant, turned: Turned) -> Status:
    changed = Case(case.registry, case.declaration, variant, case.options)
    plain = case if start.name == case.variant.name else Case(case.registry, case.declaration, start, case.options)
    try:
        try:
            reference = changed.reference.logits
        except NotProven:
            raise
        except Exception:  # config classes and models refuse values by errors of many kinds
            return "refused by transformers"
        if not np.isfinite(reference).all():
            return "refused by transformers"
        try:
            config = changed.config()
            architecture = changed.describe(config)
            refuse_ignored(config)
        except (ConfigError, UnsupportedError):
            return "refused by the plugin"
        except Exception as error:
            turned.failures.append(f"With {variant.name}, a hook raises {type(error).__name__}: {error}.")
            return "wrong"
        same = reference.shape == plain.reference.logits.shape and np.array_equal(reference, plain.reference.logits)
        if same and architecture.spec == plain.architecture.spec:
            return "without effect"
        return _held(changed, variant, turned)
    finally:
        changed.clear()
        if plain is not case:
            plain.clear()
        if len(turned.errors) % PROGRAMS == PROGRAMS - 1:
            case.backend.forget_programs()


def rounds_alike(changed: Case) -> bool:
    """Whether our logits are as near to transformers' float64 ones as its float32 ones are: some settings (of gemma4)
    amplify rounding. False where one of them cannot be had."""
    import torch

    model = changed.reference.model.double()
    try:
        with torch.no_grad():
            exact = model(input_ids=torch.tensor(changed.reference.token_ids)).logits.numpy()
        ours = changed.logits
    except Exception:  # a mistake may raise anything, and experts of transformers refuse float64
        return False
    finally:
        model.float()
    return relative_error(ours, exact) <= relative_error(changed.reference.logits, exact)


def _held(changed: Case, variant: Variant, turned: Turned) -> Status:
    try:
        error = relative_error(changed.logits, changed.reference.logits)
        turned.errors.append(error)
        if error <= FLOAT32 or rounds_alike(changed):
            return "turned"
        sentence = f"the logits differ from transformers' by {error:.1e} of their scale"
    except UnsupportedError:
        return "refused by the plugin"
    except (TTPUError, CheckFailure) as problem:
        sentence = " ".join(str(problem).split()).rstrip(".")
    diagnosis = diagnose(changed) if len(turned.failures) < DIAGNOSED else ""
    turned.failures.append(f"With {variant.name}, {sentence}. {diagnosis}".rstrip())
    return "wrong"
