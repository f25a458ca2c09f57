"""What operators do with instances and routers: tell a router of them (`announce`), link them before requests come
(`introduce`, which the router itself can do), and wait until one may be ended (`drain`).

How a request is routed is not known here.
"""
