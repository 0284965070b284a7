"""The protocol as pure state machines: what arrived goes in, what to do comes out. No sockets, clocks or threads."""
