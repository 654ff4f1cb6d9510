"""The dashboard: programs, engines and queues, live, on the admin site."""
