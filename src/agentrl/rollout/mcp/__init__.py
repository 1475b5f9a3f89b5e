"""The MCP agent: tools from an MCP server, scorers, and the sampler that drives them."""
