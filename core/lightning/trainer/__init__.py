"""The loop: sample groups, credit, train, serve the result, again."""

from lightning.trainer.dev import DevReport
from lightning.trainer.summary import Evaluation, Summary
from lightning.trainer.trainer import Trainer

__all__ = ["DevReport", "Evaluation", "Summary", "Trainer"]
