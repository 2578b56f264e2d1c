"""Errors that a user can correct. Each message is one sentence with four parts: the request, the finding, the
allowed values, and the remedy. The command line prints it and exits with status 2, without a traceback."""


class TTPUError(Exception):
    """Base of every error that TTPU raises on purpose.

    Attributes:
        hook: the hook of a plugin that was being asked when it was raised, or None.
        place: `folder/file.py:line` in the plugin's source, or "".
    """

    hook: str | None = None
    place: str = ""


class CheckpointError(TTPUError):
    """A checkpoint's files are missing, truncated, malformed, or of a kind that is never loaded."""


class ConfigError(TTPUError):
    """A model's config.json lacks a needed key or holds an unsupported value."""


class DataError(TTPUError):
    """Training data is missing, malformed, or of an unknown kind; or its cache cannot be written."""


class MappingError(TTPUError):
    """A checkpoint's tensors and a model's parameters do not match."""


class PluginError(TTPUError):
    """A plugin is missing, broken, built for another core, or claims a name that is taken."""


class UnsupportedError(TTPUError):
    """A well-formed request that the chosen backend or device cannot run."""


class RequestError(TTPUError, ValueError):
    """The values of a generation request are out of range or contradict each other. `param` names the wrong value,
    and `code` the kind of error for programs."""

    def __init__(self, *message: object, param: str | None = None, code: str | None = None) -> None:
        super().__init__(*message)
        self.param, self.code = param, code


class BusyError(RequestError):
    """A request for what others use: the same request may succeed when they are done."""


class MissingDependencyError(TTPUError, ImportError):
    """A command or class needs a distribution that is not installed. The message contains the `pip install` command."""


class LaunchError(TTPUError):
    """Several processes cannot be started or cannot find each other, or one of them failed."""


class PlanError(TTPUError):
    """A plan file that is missing, malformed, of another version, or made for another model."""
