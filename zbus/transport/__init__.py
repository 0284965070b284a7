"""Sockets and everything that touches them: the only package that imports zmq."""
