"""The ceiling model: frozen inputs in, a frozen `Ceiling` out. Pure: no I/O, no clock, no logging, no globals."""
