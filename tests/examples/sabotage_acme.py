"""Adapters that are wrong in one way each, for `test_third_party_contract.py`: the kit has to say so."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace

import acme_agents
import lightning_acme
import pytest
from lightning.testing import contract_house
from lightning.testing.contract_harness import in_thread
from test_contract import TestAcme

Listener = lightning_acme.LightningListener


class Broken(TestAcme):
    """Breaks the adapter for the length of a test."""

    @pytest.fixture(autouse=True)
    def _break(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sabotage(monkeypatch)

    def sabotage(self, patch: pytest.MonkeyPatch) -> None:
        raise NotImplementedError


class TestForgetsToReset(Broken):
    def sabotage(self, patch):
        patch.setattr(Listener, "on_end", lambda self, run: None)


class TestKeepsStateAfterErrors(Broken):
    def sabotage(self, patch):
        real = Listener.on_end
        patch.setattr(Listener, "on_end", lambda self, run: None if run.error else real(self, run))


class TestCallsEveryToolOk(Broken):
    def sabotage(self, patch):
        real = Listener.__init__
        patch.setattr(
            Listener, "__init__", lambda self, emit: real(self, lambda event: emit(replace(event, status="ok")))
        )


class TestMakesUpCallIds(Broken):
    def sabotage(self, patch):
        real = Listener.__init__
        patch.setattr(
            Listener, "__init__", lambda self, emit: real(self, lambda event: emit(replace(event, call_id="1")))
        )


class TestOneGlobalForAll(Broken):
    """Remembers the innermost run in a global, which concurrent rollouts overwrite."""

    def sabotage(self, patch):
        class Global:
            run = None

            def set(self, run):
                self.run = run

            def get(self):
                return self.run

        patch.setattr(lightning_acme, "_innermost", Global())


class TestOneGlobalForAbandonedRuns(TestOneGlobalForAll):
    """The same where agents run in threads of their own, and cannot be cancelled."""

    capabilities = TestAcme.capabilities - {"cancel"}

    async def run(self, agent, text, *, stream=False):
        return await asyncio.to_thread(asyncio.run, super().run(agent, text, stream=stream))


class TestBlocksTheLoop(Broken):
    capabilities = TestAcme.capabilities - {"cancel"}

    async def run(self, agent, text, *, stream=False):
        return in_thread(lambda: asyncio.run(TestAcme.run(self, agent, text)))

    def sabotage(self, patch):
        patch.setattr(contract_house, "PAUSE", 0.5)


class TestCannotBeUndone(Broken):
    def sabotage(self, patch):
        patch.setattr(acme_agents, "remove_listener", lambda listener: None)


class TestChangesWhatTheModelReads(Broken):
    def sabotage(self, patch):
        def on_end(self, run):
            lightning_acme._innermost.set(run.parent)
            if run.kind == "tool" and run.output is not None:
                run.output = f"{run.output} "

        patch.setattr(Listener, "on_end", on_end)


class TestOneSpanForAll(Broken):
    def sabotage(self, patch):
        real = lightning_acme.caller
        patch.setattr(lightning_acme, "caller", lambda run: replace(real(run), span_id="1"))


class TestNewSpanForEachRequest(Broken):
    def sabotage(self, patch):
        real, made = lightning_acme.caller, []

        def caller(run):
            made.append(run)
            return replace(real(run), span_id=str(len(made)))

        patch.setattr(lightning_acme, "caller", caller)


class TestForgetsOuterAgents(Broken):
    def sabotage(self, patch):
        real = lightning_acme.caller
        patch.setattr(lightning_acme, "caller", lambda run: replace(real(run), path=(real(run).agent,)))


class TestReplacesTheUsersListeners(Broken):
    def sabotage(self, patch):
        real = acme_agents.add_listener

        def add(listener):
            if isinstance(listener, Listener):
                acme_agents._listeners.clear()
            real(listener)

        patch.setattr(acme_agents, "add_listener", add)
        patch.setattr(acme_agents, "remove_listener", lambda one: acme_agents._listeners.clear())


class TestPhonesHome(Broken):
    def sabotage(self, patch):
        def on_start(self, run):
            lightning_acme._innermost.set(run)
            with contextlib.suppress(OSError):
                socket.create_connection(("traces.acme.example", 443))

        patch.setattr(Listener, "on_start", on_start)


class TestRaises(Broken):
    def sabotage(self, patch):
        class Unreadable:
            def set(self, run):
                pass

        patch.setattr(lightning_acme, "_innermost", Unreadable())


class TestRaisesInItsCallback(Broken):
    def sabotage(self, patch):
        patch.setattr(Listener, "on_start", lambda self, run: 1 / 0)


class TestTooOld(Broken):
    def sabotage(self, patch):
        patch.setattr(lightning_acme, "SUPPORTED", {"lightning": ("99", "100")})
