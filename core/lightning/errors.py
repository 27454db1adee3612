"""Every error lightning raises on purpose; each message names the culprit and the cure.

    LightningError
    ├── MissingExtraError (ImportError)      an optional dependency is not installed
    ├── ConfigError (ValueError)             a setting is unknown or impossible
    ├── PluginError (RuntimeError)           a plugin could not be loaded or used
    ├── DataError (ValueError)               tasks, rewards or tokens that cannot be trained on
    ├── StoreError (RuntimeError)            the database refused
    │   ├── SchemaError                      it is corrupt, or of another schema
    │   ├── UnavailableError                 it cannot be reached now; asking again may help
    │   ├── StaleAttemptError                a late writer was fenced off
    │   ├── ConflictError                    one idempotency key, two contents
    │   └── ParentGoneError                  the texts of a branch's parent are not there any more
    ├── GatewayError (RuntimeError)          the gateway could not start or serve
    ├── PolicyServerError (RuntimeError)     vLLM did not start, died, or refused new weights
    ├── EngineError (RuntimeError)           the training engine cannot load or step
    │   └── WorkersLostError                 one of its worker processes died
    ├── RunnerError (RuntimeError)           agents cannot be run at all (one agent's fault is an Outcome, not this)
    ├── OptimizerError (RuntimeError)        the model that writes prompts does not answer
    ├── JudgeError (RuntimeError)            the model that judges rollouts does not answer
    └── AuditError (AssertionError)          the trained batches are not what the store holds

Each one also subclasses the builtin it refines, so `except ValueError` keeps working. All can be pickled.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning.installation import install_command


class LightningError(Exception):
    """Base of all errors raised by lightning."""


class MissingExtraError(LightningError, ImportError):
    """An optional dependency is missing. The message has the command that installs it: `command`, or else one that installs the
    extra from where lightning came from."""

    def __init__(self, extra: str, module: str = "", command: str = "") -> None:
        self.extra, self.module, self.command = extra, module, command or install_command(extra)
        what = f"module {module!r} is not installed" if module else f"the extra {extra!r} is not installed"
        super().__init__(f"{what}. Run: {self.command}")

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        return (type(self), (self.extra, self.module, self.command))


def import_extra(extra: str, module: str) -> Any:
    """Import a module that needs the packages of an extra. Raises `MissingExtraError` when one of them is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(extra, error.name or "") from error


class ConfigError(LightningError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another one."""


class PluginError(LightningError, RuntimeError):
    """A plugin could not be imported, registered or called."""


class DataError(LightningError, ValueError):
    """Tasks, rewards, ids or logprobs that cannot be trained on."""


class StoreError(LightningError, RuntimeError):
    """The store refused an operation or cannot be reached."""


class SchemaError(StoreError):
    """The database is corrupt, or has another schema than this version of lightning."""


class UnavailableError(StoreError):
    """The database, or every server in front of it, cannot be reached now. The request itself was not wrong."""


class StaleAttemptError(StoreError):
    """A writer of an attempt that has been superseded, or has already ended, was refused."""


class ConflictError(StoreError):
    """The same idempotency key arrived with different content."""


class ParentGoneError(StoreError):
    """The recorded requests and answers that a branch needs cannot be read: its parent was removed, or made again under the
    same id. Nothing else is damaged."""


class GatewayError(LightningError, RuntimeError):
    """The gateway could not start or lost its upstreams."""


class PolicyServerError(LightningError, RuntimeError):
    """vLLM did not start, died, or did not take new weights."""


class EngineError(LightningError, RuntimeError):
    """The training engine cannot load the model or take the step."""


class WorkersLostError(EngineError):
    """A worker process of an engine died, or the machine under it."""


class RunnerError(LightningError, RuntimeError):
    """Agents cannot be run at all."""


class OptimizerError(LightningError, RuntimeError):
    """The model that criticises and edits prompts did not answer, or answered something else."""


class JudgeError(LightningError, RuntimeError):
    """The model that judges rollouts did not answer."""


class AuditError(LightningError, AssertionError):
    """The trained batches are not what the store holds."""
