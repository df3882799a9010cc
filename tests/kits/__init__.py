"""What tests share: processes, environments, cases, models. Tests import it as `kits`."""
