"""Rank 0 binds MASTER_PORT as torch's store does; every rank connects to MASTER_ADDR:MASTER_PORT and says so."""

import os
import socket
import threading

from .talk import Line, obey

DEADLINE_S = 20.0


def serve(world_size: int) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", int(os.environ["MASTER_PORT"])))
    listener.listen(world_size)

    def answer() -> None:
        while True:
            with listener.accept()[0] as one:
                one.sendall(f"cycle {os.environ['NVRX_CYCLE']}".encode())

    threading.Thread(target=answer, daemon=True).start()


def connect() -> str:
    """What rank 0 of this cycle answers. It may start later than we do."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.05)):
        try:
            with socket.create_connection(address, DEADLINE_S) as one:
                return one.recv(100).decode()
        except ConnectionRefusedError:
            pause.wait(0.05)
    raise TimeoutError(f"nobody listens at {address}")


def main() -> None:
    line = Line()
    if os.environ["RANK"] == "0":
        serve(int(os.environ["WORLD_SIZE"]))
    line.say("met", answer=connect())
    obey(line)


if __name__ == "__main__":
    main()
