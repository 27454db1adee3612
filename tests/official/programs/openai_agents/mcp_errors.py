"""An agent whose tools are an MCP server's, one of which fails, and a die that is thrown twice at once."""

import asyncio
import itertools
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool
from agents.mcp import MCPServerStdio

throws = itertools.count(1)


@function_tool
async def throw_die(sides: int) -> str:
    """Throw a die. Call it twice at once."""
    number = next(throws)
    await asyncio.sleep(0.2 if number == 1 else 0)  # the first is the last to end
    return f"throw {number}"


async def main() -> None:
    command = {"command": sys.executable, "args": [str(Path(__file__).with_name("mcp_server.py"))]}
    async with MCPServerStdio(params=command, client_session_timeout_seconds=120) as server:
        reporter = Agent("reporter", instructions="Report the weather.", mcp_servers=[server])
        print((await Runner.run(reporter, "How is it in Tokyo?")).final_output)
    player = Agent("player", instructions="Play.", tools=[throw_die])
    print((await Runner.run(player, "Throw two dice.")).final_output)


if __name__ == "__main__":
    asyncio.run(main())
