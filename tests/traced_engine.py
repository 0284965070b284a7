"""An engine that records spans and sessions of its own."""

from __future__ import annotations

import asyncio

import zbus
from zbus import trace


class Recording(zbus.Engine):
    def setup(self, ctx):
        self.ctx = ctx
        with trace.span("set up"):
            pass

    @zbus.endpoint()
    def work(self, step):
        with trace.span("inner", step=step), trace.session_context():
            pass
        return self.ctx.tracer is trace.get_tracer()

    @zbus.endpoint(lane="gen")
    async def later(self):
        async with trace.span("async"):
            await asyncio.sleep(0)

    @zbus.endpoint(lane="gen")
    def beside(self):
        with trace.span("beside"):
            pass
