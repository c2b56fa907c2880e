"""A port that nobody listens on, for processes that are about to meet there."""

import socket


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
