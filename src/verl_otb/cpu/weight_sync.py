"""A failed weight sync ends the run with its cause.

verl sends weights to vLLM in buckets, over a ZeroMQ request socket, while a Ray call to vLLM receives them. If the
receiver fails, stock verl hangs: the sender waits for an acknowledgement without a limit, and looks at the outcome
of the Ray call only afterwards. Here the sender looks at it while it waits.
"""

import functools
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import zmq

POLL_MILLISECONDS = 1000
# The calls that receive now, by the address that the sender of each uses.
_receivers: dict[str, Future[Any]] = {}


def address_of_this_run(address: str) -> str:
    """`address` with the process id of this run's raylet, which all its processes inherit in their environment.

    verl tells runs apart by Ray's job id. That is 1 in every Ray that a run starts for itself, so two runs on one
    machine would load each other's weights.
    """
    return address.replace("zmq-", f"zmq-{os.environ.get('RAY_RAYLET_PID', '')}-", 1)


def use_own_address(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructors of `BucketedWeightSender` (in the actor) and `BucketedWeightReceiver` (in vLLM)."""

    @functools.wraps(init)
    def init_with_own_address(self: Any, zmq_handle: str, *args: Any, **kwargs: Any) -> None:
        init(self, address_of_this_run(zmq_handle), *args, **kwargs)

    return init_with_own_address


def raise_the_cause(receive_weights: Callable[..., None]) -> Callable[..., None]:
    """Wrap `BucketedWeightReceiver.receive_weights` (in vLLM).

    On the CPU the received tensors are views of the shared memory, and the traceback of a failed load holds them,
    so closing the memory fails in turn, and hides why.
    """

    @functools.wraps(receive_weights)
    def receive(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            receive_weights(self, *args, **kwargs)
        except BufferError as error:
            cause = error.__context__
            if cause is None:
                raise
            # vLLM passes on nothing but the text.
            raise RuntimeError(f"loading the weights into vLLM failed: {cause!r}") from cause

    return receive


def remember_the_receiver(execute_method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap `ServerAdapter._execute_method` (in the actor), which starts the receiving call."""

    @functools.wraps(execute_method)
    async def execute(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        result = await execute_method(self, method, *args, **kwargs)
        if method == "update_weights_from_ipc" and result is not None:
            _receivers[address_of_this_run(self.zmq_handle)] = result.future()
        return result

    return execute


def watch_the_receiver(init_socket: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `BucketedWeightSender._init_socket` (in the actor): its socket then watches the receiving call."""

    @functools.wraps(init_socket)
    def init(self: Any) -> None:
        init_socket(self)
        receiver = _receivers.get(self.zmq_handle)
        if receiver is not None:
            self.socket = WatchfulSocket(self.socket, receiver)

    return init


class WatchfulSocket:
    """A ZeroMQ socket that stops waiting when `receiver` has ended, and raises its exception."""

    def __init__(self, socket: zmq.Socket, receiver: Future[Any]) -> None:
        self._socket = socket
        self._receiver = receiver

    def send_pyobj(self, message: Any) -> None:
        self._wait(zmq.POLLOUT)
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        self._wait(zmq.POLLIN)
        return self._socket.recv()

    def close(self) -> None:
        # linger=0: a message that nobody will take must not keep the process from ending.
        self._socket.close(linger=0)

    def _wait(self, event: int) -> None:
        while not self._socket.poll(POLL_MILLISECONDS, event):
            # Asked again once it is done: its last acknowledgement may have come since.
            if self._receiver.done() and not self._socket.poll(0, event):
                self._receiver.result()
                raise RuntimeError("vLLM ended a weight sync before it had taken all weights")
