"""The MCP agent: tools from an MCP server, and the sampler that drives them."""
