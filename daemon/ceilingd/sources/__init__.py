"""Where readings come from. Each module does the I/O of one world and hands text or raw numbers to `ceilingd.parse`."""
