"""Plans made while a deployment serves: after drift, with calibrated times, for devices that joined or were measured."""
