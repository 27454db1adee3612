"""The record plugin: its call stages, its step stage, and the route for feedback."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.config import Config, PluginSettings
    from lightning.gateway.calls import Parts
    from lightning.gateway.stages import CallStage
    from lightning.trainer.stages import StepStage
    from starlette.types import ASGIApp


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings `gateway.record_requests` and `gateway.providers`."""
    register("record", later("lightning_record.config:RecordConfig"))


@hookimpl
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Register the call stages `providers`, `conversations`, `history` and `texts`."""
    register("providers", made_later("lightning_record.providers:stage"))
    register("conversations", made_later("lightning_record.conversations:ConversationsStage"))
    register("history", made_later("lightning_record.conversations:HistoryStage"))
    register("texts", made_later("lightning_record.texts:stage"))


@hookimpl
def register_step_stages(register: Callable[[str, Callable[[Config], StepStage | None]], None]) -> None:
    """Register the step stage `record`."""
    from lightning_record.replayable import ReplayableStage

    register("record", lambda config: ReplayableStage())


@hookimpl
def register_routes(register: Callable[[str, Callable[[Parts], ASGIApp]], None]) -> None:
    """Register the route `feedback`."""
    register("feedback", made_later("lightning_record.feedback:FeedbackEndpoint"))
