"""Mathematics without tools."""
