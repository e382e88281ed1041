# What CMake puts into the Python package, the install component "python": the libraries and the stub, beside the modules.

# Installs `library` and halfstep_io `io`, two paths, each as one real file, since a wheel holds no links. The second may be missing or empty:
# the package then cannot keep states in a file. Python loads the first to make the stub. In a cross build it
# cannot be loaded: the wheel goes without a stub unless HALFSTEP_STUB names one. A native build makes the same.
function(halfstep_install_python library io)
  add_custom_target(halfstep_python) # what a wheel needs to be built
  set(prefix ${CMAKE_SHARED_LIBRARY_PREFIX})
  if(WIN32)
    set(prefix "")
  endif()
  install(FILES ${library} DESTINATION halfstep COMPONENT python EXCLUDE_FROM_ALL
    RENAME ${prefix}halfstep${CMAKE_SHARED_LIBRARY_SUFFIX})
  if(io)
    install(FILES ${io} DESTINATION halfstep COMPONENT python EXCLUDE_FROM_ALL OPTIONAL
      RENAME ${prefix}halfstep_io${CMAKE_SHARED_LIBRARY_SUFFIX})
  endif()
  set(stub "${HALFSTEP_STUB}")
  if(NOT stub)
    if(CMAKE_CROSSCOMPILING)
      message(STATUS "The Python package has no stub: a cross build cannot run its library (-DHALFSTEP_STUB=FILE gives one)")
      return()
    endif()
    find_package(Python3 3.9 COMPONENTS Interpreter QUIET)
    if(NOT Python3_FOUND)
      message(STATUS "The Python package has no stub: Python 3.9 or newer was not found (-DHALFSTEP_STUB=FILE gives one)")
      return()
    endif()
    set(stub ${PROJECT_BINARY_DIR}/__init__.pyi)
    install(CODE "execute_process(
      COMMAND [==[${Python3_EXECUTABLE}]==] -I [==[${PROJECT_SOURCE_DIR}/cmake/stub.py]==] [==[${library}]==] [==[${stub}]==]
      RESULT_VARIABLE failed)
      if(failed)
        message(FATAL_ERROR \"The stub of the Python package cannot be made by cmake/stub.py (-DHALFSTEP_STUB=FILE gives one)\")
      endif()" COMPONENT python EXCLUDE_FROM_ALL)
  endif()
  install(FILES ${stub} DESTINATION halfstep COMPONENT python EXCLUDE_FROM_ALL RENAME __init__.pyi)
endfunction()
