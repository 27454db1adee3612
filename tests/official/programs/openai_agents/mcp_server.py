"""A server of the Model Context Protocol with two tools, one of which fails."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("Weather")


@server.tool()
def temperature(city: str) -> str:
    """The temperature of a city."""
    return f"20 degrees in {city}"


@server.tool()
def humidity(city: str) -> str:
    """The humidity of a city."""
    raise ValueError(f"no station in {city}")


if __name__ == "__main__":
    server.run(transport="stdio")
