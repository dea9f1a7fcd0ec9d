"""Pure functions from text and raw numbers to records: no I/O, no clock, no logging."""
