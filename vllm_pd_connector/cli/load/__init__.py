"""Commands about a load of requests: what serves it (`plan`), and how well what runs serves it (`bench`)."""
