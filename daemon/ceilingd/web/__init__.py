"""The HTTP side: routes, rendering cache, status page. Nothing here touches a device or the network beyond its clients."""
