"""The errors that a user can put right. Each message is one sentence that says what was asked, what was found,
what is allowed and what to do; the command line prints it and exits with status 2, without a traceback."""


class TTPUError(Exception):
    """Base of every error that TTPU raises on purpose."""


class CheckpointError(TTPUError):
    """A checkpoint's files are missing, truncated, malformed, or of a kind that is never loaded."""


class ConfigError(TTPUError):
    """A model's config.json lacks a needed key or holds a value that no plugin can honour."""


class MappingError(TTPUError):
    """A checkpoint's tensors and a model's parameters do not account for each other."""


class PluginError(TTPUError):
    """A plugin is missing, broken, built for another core, or claims a taken name."""


class UnsupportedError(TTPUError):
    """Something well-formed that the chosen backend or device cannot run."""


class RequestError(TTPUError, ValueError):
    """A generation request whose values are out of range or contradict each other; `param` names the value at fault,
    and `code` the kind of fault, where a program may want to know."""

    def __init__(self, *message: object, param: str | None = None, code: str | None = None) -> None:
        super().__init__(*message)
        self.param, self.code = param, code


class MissingDependencyError(TTPUError, ImportError):
    """A command or class needs a distribution that is not installed; the message names the `pip install`."""


class LaunchError(TTPUError):
    """Several processes cannot be started, cannot find each other, or one of them failed."""


class PlanError(TTPUError):
    """A plan file that is missing, malformed, of another version, or made for another model."""
