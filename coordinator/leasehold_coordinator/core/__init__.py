"""State machines and rules. Pure: no clock, no database and no event loop."""
