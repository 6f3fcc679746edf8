"""HTTP/1.1 on asyncio protocols: a server and a client with as little between socket and router as can be.

Bytes become requests and answers in llhttp (httptools), in its strict mode. What it leaves open is decided
here: the lengths of heads and bodies, how long a client may take, when a connection serves again.
"""
