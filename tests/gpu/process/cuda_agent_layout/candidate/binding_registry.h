#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>

// Bindings register themselves before the module is made.
class BindingRegistry {
 public:
  using Binding = std::function<void(pybind11::module&)>;

  static BindingRegistry& getInstance() {
    static BindingRegistry registry;
    return registry;
  }

  void registerBinding(const std::string& name, Binding binding) { all_.emplace_back(name, std::move(binding)); }

  void applyBindings(pybind11::module& m) {
    for (auto& [name, binding] : all_) binding(m);
  }

 private:
  std::vector<std::pair<std::string, Binding>> all_;
};

struct BindingRegistrar {
  BindingRegistrar(const std::string& name, BindingRegistry::Binding binding) {
    BindingRegistry::getInstance().registerBinding(name, std::move(binding));
  }
};

#define REGISTER_BINDING(name, function) \
  static BindingRegistrar registrar_##name(#name, [](pybind11::module& m) { function(m); })
